"""`moet pack` with options about calibration."""

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate_cases import SOURCES

from moet.calibrate.open import open_encoder
from moet.cli.pack import encoder_of, pack, scheme_of
from moet.errors import CheckpointError, ConfigError, PackError
from moet.quantize.schemes import DEFAULT_SCHEME, PLAIN_SCHEME, SCHEMES


def moet(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "moet", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_pack_on_a_file(tmp_path, capsys):
    SOURCES["mixtral"](tmp_path / "src")
    (tmp_path / "mine.txt").write_text("All work and no play makes Jack a dull boy. " * 1000)
    options = ("--calibration", tmp_path / "mine.txt", "--calibration-tokens", 2048, "--device", "cpu")
    run = moet("pack", tmp_path / "src", tmp_path / "dst", "--json", *options)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["scheme"] == DEFAULT_SCHEME and report["calibration"]["tokens"] == 2048
    pack(
        str(tmp_path / "src"),
        tmp_path / "dst",
        calibration=[tmp_path / "mine.txt"],
        calibration_tokens=2048,
        device="cpu",
    )
    printed = capsys.readouterr().out
    assert "was finished already" in printed
    assert f"{DEFAULT_SCHEME}, calibrated on 2048 tokens: output error" in printed
    with pytest.raises(PackError, match=f"scheme {DEFAULT_SCHEME}, but this run has {PLAIN_SCHEME}"):
        pack(str(tmp_path / "src"), tmp_path / "dst", calibrate=False)


def test_what_the_options_say_together(tmp_path):
    file = [tmp_path]
    assert scheme_of(None, True, None) == scheme_of(None, None, file) == DEFAULT_SCHEME
    assert scheme_of(None, False, None) == PLAIN_SCHEME
    assert scheme_of(None, None, None) == DEFAULT_SCHEME
    for name, scheme in SCHEMES.items():
        assert scheme_of(name, None, None) == scheme_of(name, scheme.calibrated, None) == name
        with pytest.raises(ConfigError, match="calibrated, as the options say, found"):
            scheme_of(name, not scheme.calibrated, None)
    with pytest.raises(ConfigError, match="expected one of sym2-rtn, .* found 'best'"):
        scheme_of("best", True, None)


def test_one_line_error(tmp_path):
    SOURCES["mixtral"](tmp_path / "src")
    run = moet("pack", tmp_path / "src", tmp_path / "dst", "--scheme", "best")
    assert run.returncode == 2 and run.stderr.startswith("moet: scheme: expected one of")


def test_without_transformers(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *arguments):
        if name == "moet.calibrate.open":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="found no transformers. `--no-calibrate` needs neither"):
        encoder_of(DEFAULT_SCHEME, tmp_path, [], 1024, "cpu")


def test_what_an_encoder_needs(tmp_path):
    SOURCES["mixtral"](tmp_path)
    with pytest.raises(ConfigError, match="device: expected cpu, or cuda where torch finds a GPU, found tpu"):
        open_encoder(tmp_path, DEFAULT_SCHEME, device="tpu")
    with pytest.raises(ConfigError, match="nowhere.txt: expected a readable text file"):
        open_encoder(tmp_path, DEFAULT_SCHEME, [Path("nowhere.txt")], device="cpu")
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="expected a tokenizer .*`--no-calibrate` needs none"):
        open_encoder(tmp_path, DEFAULT_SCHEME, device="cpu")
