"""`moet pack` and `moet verify` as commands: what they print, and what they leave with."""

import json
import subprocess
import sys

import pytest
from pack_cases import SOURCES, contents, copy


def moet(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "moet", *map(str, arguments)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mxfp4"](root / "src")
    run = moet("pack", root / "src", root / "dst", "--json", "--no-calibrate")
    assert run.returncode == 0, run.stderr
    return root, run


def test_json_report(made):
    root, run = made
    report = json.loads(run.stdout)
    stored = json.loads((root / "dst" / "moet.json").read_text())
    assert report["report"] == stored["report"] and report["fingerprint"] == stored["fingerprint"]
    assert report["bytes"] == sum(
        p.stat().st_size for p in (root / "dst").rglob("*") if p.is_file() and p.name != "moet.json"
    )
    assert report["seconds"] > 0 and not report["resumed"] and not report["was_finished"]
    assert "layer 5" in run.stderr, "progress goes to standard error"


def test_report_for_people(made, tmp_path):
    root, _ = made
    run = moet("pack", root / "src", tmp_path / "dst", "--no-native", "--no-calibrate")
    for words in (
        "gate",
        "up",
        "down",
        "relative RMS error",
        "sign bias",
        "bits a weight",
        "no native rows",
        "GB/s of source",
        "fingerprint",
    ):
        assert words in run.stdout
    again = moet("pack", root / "src", tmp_path / "dst", "--no-native", "--no-calibrate")
    assert again.returncode == 0 and "was finished already" in again.stdout


def test_verify_and_repair(made, tmp_path):
    root, _ = made
    pack = copy(root / "dst", tmp_path / "pack")
    good = moet("verify", pack)
    assert good.returncode == 0 and "every byte is right" in good.stdout
    with (pack / "experts" / "native-002.safetensors").open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"damage")
    (pack / "NOTES.md").write_text("mine")
    bad = moet("verify", pack)
    assert bad.returncode == 1
    assert (
        "bad: experts/native-002.safetensors, layer 2, expert" in bad.stdout
        and "not part of the pack: NOTES.md" in bad.stdout
    )
    found = json.loads(moet("verify", pack, "--json").stdout)
    assert not found["ok"] and found["faults"][0]["layer"] == 2 and found["faults"][0]["rows"] == "native"
    mended = moet("verify", pack, "--repair", root / "src")
    assert mended.returncode == 0 and "rewritten: experts/native-002.safetensors" in mended.stdout
    (pack / "NOTES.md").unlink()
    assert contents(pack) == contents(root / "dst")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["pack", "nowhere/at/all", "dst"],
            "expected a checkpoint folder or a Hub id ORG/NAME, found neither",
        ),
        (["verify", "nowhere"], "expected a pack folder, found nothing there"),
    ],
)
def test_one_line_errors(tmp_path, arguments, message):
    run = moet(*arguments)
    assert run.returncode == 1 and message in run.stderr and "Traceback" not in run.stderr
