"""Packs with calibrated rows: what is in them, and that a run that was stopped ends with the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate_cases import SOURCES, encoder, pack_calibrated, some_windows

from moet.calibrate import stored
from moet.calibrate.encoder import CalibratedEncoder
from moet.calibrate.open import open_encoder
from moet.checkpoint import Checkpoint, LocalSource
from moet.errors import CheckpointError, PackError
from moet.layout import check_row, dequantize_row
from moet.pack import Pack, durable, space
from moet.pack.packer import pack
from moet.pack.progress import Progress
from moet.pack.repair import repair
from moet.pack.verify import verify
from tests.cpu.pack_cases import contents, copy


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mixtral"](root / "src")
    pack_calibrated(root / "src", root / "dst")
    return root


@pytest.mark.parametrize("key", SOURCES)
def test_every_family_packs(key, tmp_path):
    SOURCES[key](tmp_path / "src")
    manifest = pack_calibrated(tmp_path / "src", tmp_path / "dst").manifest
    assert verify(tmp_path / "dst").ok
    assert manifest.scheme == "sym2-gptq"
    assert manifest.calibration.digest == some_windows().digest
    assert (manifest.calibration.tokens, manifest.calibration.window) == (6 * 32, 32)
    checkpoint = Checkpoint.open(tmp_path / "src")
    for layer, spec in zip(manifest.layers, checkpoint.spec.layers, strict=True):
        assert (layer.calibration is None) == (spec.mtp and key.startswith("v4"))
        if layer.calibration:
            c = layer.calibration
            assert len(c.output_error) == spec.experts and 0 < np.median(c.output_error) < 1
            assert 0 <= c.tokens_min <= c.tokens_median <= 6 * 32
            assert 0 < c.fallback <= spec.experts  # 192 tokens in all: fewer than 128 for most
    assert not (tmp_path / "dst" / ".moet").exists()


def watched(using: CalibratedEncoder) -> tuple[CalibratedEncoder, list]:
    """The encoder, and a list that will hold what its solver returned, in order."""
    found, real = [], using.encode

    def encode(*arguments):
        found.append(real(*arguments))
        return found[-1]

    using.encode = encode
    return using, found


@pytest.mark.parametrize("name", ["sym2-gptq", "tcq2-gptq"])
def test_rows_hold_the_codes(made, tmp_path, name):
    """What the solver returned is what a row means."""
    using, solved = watched(encoder(name=name))
    pack_calibrated(made / "src", tmp_path / "dst", using=using)
    if name == "sym2-gptq":
        assert contents(tmp_path / "dst") == contents(made / "dst")
    for number, layer in enumerate(Pack.open(tmp_path / "dst").layers.values()):
        first, second = solved[2 * number : 2 * number + 2]
        for e in range(layer.experts):
            geometry = layer.base.geometry
            row = np.fromfile(layer.base.path, np.uint8, geometry.row_bytes, offset=layer.base.offset(e))
            assert check_row(geometry, row) == []
            gate, up, down = dequantize_row(geometry, row)
            assert np.array_equal(np.concatenate([gate, up]), first.values[e].numpy())
            assert np.array_equal(down, second.values[e].numpy())


def test_it_answers_better_than_rounding(made, tmp_path):
    """The same experts, each weight by itself, through the same pipeline."""
    using = encoder()
    real, using.encode = using.encode, lambda weight, *_: real(weight)
    rounded = pack_calibrated(made / "src", tmp_path / "dst", using=using).manifest
    calibrated = Pack.open(made / "dst").manifest
    for mine, other in zip(calibrated.layers, rounded.layers, strict=True):
        assert np.mean(mine.calibration.output_error) < 0.9 * np.mean(other.calibration.output_error)


@pytest.mark.parametrize("name", ["tcq2-rtn", "sym2-rtn"])
def test_a_scheme_without_text(made, tmp_path, name):
    outcome = pack_calibrated(made / "src", tmp_path / "dst", using=open_encoder(made / "src", name))
    assert verify(tmp_path / "dst").ok
    assert outcome.manifest.scheme == name and outcome.manifest.calibration is None
    assert {layer.base.format for layer in outcome.manifest.layers} == {name[:4]}
    assert outcome.manifest.report.gate.error < 0.4


class Stop(BaseException):
    pass


def stop_at(monkeypatch, step: int) -> None:
    """The `step`-th rename of the run fails before it happens, as if the process had ended there."""
    real, count = os.replace, iter(range(10**6))

    def replace(a, b):
        if next(count) == step:
            raise Stop
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)


def stopped(made, dst: Path, monkeypatch, step: int) -> Path:
    with monkeypatch.context() as m:
        stop_at(m, step)
        with pytest.raises(Stop):
            pack_calibrated(made / "src", dst)
    return dst


@pytest.mark.parametrize("step", range(1, 22, 2))
def test_stopped_at_any_rename(made, tmp_path, monkeypatch, step):
    dst = stopped(made, tmp_path / "dst", monkeypatch, step)
    pack_calibrated(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def test_stopped_before_the_mtp_layer(tmp_path, monkeypatch):
    SOURCES["glm-5.2, dense layer first, carry, MTP"](tmp_path / "src")
    pack_calibrated(tmp_path / "src", tmp_path / "whole")
    with monkeypatch.context() as m, pytest.raises(Stop):
        m.setattr(CalibratedEncoder, "_runs", lambda self, index: (_ for _ in ()).throw(Stop))
        pack_calibrated(tmp_path / "src", tmp_path / "dst")
    assert stored.there(tmp_path / "dst")
    pack_calibrated(tmp_path / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_states_that_were_lost_are_computed_again(made, tmp_path, monkeypatch):
    dst = stopped(made, tmp_path / "dst", monkeypatch, 14)
    finished = json.loads((dst / ".moet" / "journal.json").read_text())["layers"]
    assert len(finished) == 2 and stored.there(dst)
    for file in (dst / stored.FOLDER).iterdir():
        file.unlink()
    pack_calibrated(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def test_a_lost_layer_is_made_again(made, tmp_path, monkeypatch):
    dst = stopped(made, tmp_path / "dst", monkeypatch, 14)
    (dst / "experts" / "base-000.safetensors").unlink()
    pack_calibrated(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def test_damaged_states_are_computed_again(made, tmp_path, monkeypatch):
    dst = stopped(made, tmp_path / "dst", monkeypatch, 14)
    for file in (dst / stored.FOLDER).iterdir():
        os.truncate(file, 1000)
    pack_calibrated(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def test_a_killed_process_goes_on(made, tmp_path):
    dst = tmp_path / "dst"
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[3])]!r}
import pathlib, calibrate_cases
calibrate_cases.pack_calibrated(pathlib.Path({str(made / "src")!r}), pathlib.Path({str(dst)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while not (dst / "experts" / "base-001.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (dst / "moet.json").exists()
    pack_calibrated(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def test_a_finished_layer_is_not_solved_again(made, tmp_path, monkeypatch):
    dst = stopped(made, tmp_path / "dst", monkeypatch, 14)
    using, solved = watched(encoder())
    pack_calibrated(made / "src", dst, using=using)
    assert len(solved) == 2  # of six: the third layer's two matrices
    assert not durable.work_dir(dst).exists()


def test_states_are_counted_as_space(made, tmp_path, monkeypatch):
    """With room for the pack and not for the states, it is refused before the first layer; and they never are more."""
    real, free = os.statvfs, [0]

    def statvfs(path):
        found = real(path)
        return SimpleNamespace(f_bavail=free[0], f_frsize=1, f_files=found.f_files)

    need = sum(p.stat().st_size for p in (made / "dst").rglob("*.safetensors")) + space.SLACK
    states = 2 * 2 * 4 * 6 * 32 * 64
    monkeypatch.setattr(space.os, "statvfs", statvfs)
    free[0] = need + states // 2
    with pytest.raises(PackError, match=r"calibration 0.2 MiB.*found"):
        pack_calibrated(made / "src", tmp_path / "dst")
    free[0] = need + states
    seen, write = [], stored.write

    def watch(root, streams):
        write(root, streams)
        seen.append(sum(p.stat().st_size for p in (root / stored.FOLDER).iterdir()))

    monkeypatch.setattr(stored, "write", watch)
    pack_calibrated(made / "src", tmp_path / "dst")
    assert states / 4 < max(seen) < states + 2 * 4096


def test_another_scheme_or_text_is_refused(made, tmp_path, monkeypatch):
    half = stopped(made, tmp_path / "half", monkeypatch, 14)
    for dst in (half, copy(made / "dst", tmp_path / "whole")):
        with pytest.raises(PackError, match="scheme sym2-gptq, but this run has sym2-rtn"):
            pack(LocalSource(made / "src"), dst)
        with pytest.raises(PackError, match=f"calibration windows {some_windows().digest}, but this run has"):
            pack_calibrated(made / "src", dst, using=encoder(some_windows(seed=1)))


def test_repair(made, tmp_path):
    """Native rows can be made again, calibrated ones cannot."""
    dst = copy(made / "dst", tmp_path / "dst")
    native, base = (dst / "experts" / f"{kind}-001.safetensors" for kind in ("native", "base"))
    for path in (native, base):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    done = repair(dst, LocalSource(made / "src"))
    assert done.rewritten == (f"experts/{native.name}",)
    assert [fault.file for fault in done.left] == [f"experts/{base.name}"] and "sym2-gptq" in done.way
    base.write_bytes((made / "dst" / "experts" / base.name).read_bytes())
    assert contents(dst) == contents(made / "dst")


def test_consume_keeps_what_is_still_needed(made, tmp_path):
    src = copy(made / "src", tmp_path / "src")

    class Consumed(LocalSource):
        gone = ()

        def fetch(self, shard):
            assert shard not in self.gone, "a shard was read after it was let go"
            return super().fetch(shard)

        def release(self, shard):
            self.gone = (*self.gone, shard)
            (self.root / shard).unlink(missing_ok=True)

    pack(Consumed(src), tmp_path / "dst", encoder=encoder(), consume=True)
    assert contents(tmp_path / "dst") == contents(made / "dst")
    assert not list(src.glob("*.safetensors"))


def test_shards_are_asked_for_when_their_layer_comes(made, tmp_path):
    """So a download may still be running: names alone are read before."""
    asked = []

    class Watched(LocalSource):
        def fetch(self, shard):
            asked.append((shard, len(list((tmp_path / "dst").glob("experts/base-*")))))
            return super().fetch(shard)

    using, source = encoder(), Watched(made / "src")
    using.begin(Checkpoint.open(source), tmp_path / "nowhere", {}, Progress())
    assert not asked
    source.ready = lambda shard: False  # as a source does that is still downloading
    pack(source, tmp_path / "dst", encoder=using)
    assert contents(tmp_path / "dst") == contents(made / "dst")
    first = {shard: next(done for name, done in asked if name == shard) for shard, _ in asked}
    assert len(first) == 2 and 0 in first.values() and max(first.values()) > 0


def test_a_model_that_transformers_lacks(made, tmp_path, monkeypatch):
    monkeypatch.setattr("moet.forward.decoder.transformers", SimpleNamespace(__version__="4.0"))
    with pytest.raises(CheckpointError, match="found MixtralForCausalLM. `--no-calibrate` needs no model"):
        pack_calibrated(made / "src", tmp_path / "dst")


def test_another_group_size_is_the_same_pack(made, tmp_path, monkeypatch):
    """On one machine with one number of threads: a batch's matrices do not know of each other."""
    monkeypatch.setattr("moet.calibrate.device.group_size", lambda *_: 3)
    pack_calibrated(made / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")
