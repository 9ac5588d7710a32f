"""A packing run that was stopped goes on and ends with the bytes of an undisturbed one; two runs at once and
other settings are refused."""

import fcntl
import json
import os
import subprocess
import sys

import pytest
from pack_cases import SOURCES, contents, copy, pack_local

from moet.checkpoint import LocalSource
from moet.errors import PackError
from moet.pack import durable, journal, lock
from moet.pack.packer import pack
from moet.pack.progress import Progress


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mxfp4"](root / "src")
    pack_local(root / "src", root / "dst")
    return root


class Stop(Exception):
    pass


def stop_at(monkeypatch, step: int) -> None:
    """The `step`-th rename of the run fails before it happens, as if the process had ended there."""
    real, count = os.replace, iter(range(10**6))

    def replace(a, b):
        if next(count) == step:
            raise Stop
        real(a, b)

    monkeypatch.setattr(durable.os, "replace", replace)


@pytest.mark.parametrize(
    "step", range(0, 29, 2)
)  # the journal, 2 dense files, 6 layers, small files; the last is moet.json's
def test_stopped_at_any_rename(made, tmp_path, monkeypatch, step):
    dst = tmp_path / "dst"
    with monkeypatch.context() as m:
        stop_at(m, step)
        with pytest.raises(Stop):
            pack_local(made / "src", dst)
    (dst / ".moet" / "tmp-orphan").write_bytes(b"left by a killed run")
    outcome = pack_local(made / "src", dst)
    assert outcome.resumed == (
        step > 2
    )  # 0: the first journal, 1: a dense file, 2: the journal that names it
    assert contents(dst) == contents(made / "dst")


def test_finished_layers_are_not_packed_again(made, tmp_path, monkeypatch):
    dst = tmp_path / "dst"
    with monkeypatch.context() as m:
        stop_at(m, 12)
        with pytest.raises(Stop):
            pack_local(made / "src", dst)
    finished = json.loads((dst / ".moet" / "journal.json").read_text())["layers"]
    assert 0 < len(finished) < 6
    times = {
        p: p.stat().st_mtime_ns for key in finished for p in dst.glob(f"experts/*-{int(key):03d}.safetensors")
    }
    stages = []

    class Listen(Progress):
        def stage(self, text):
            stages.append(text)

    pack(LocalSource(made / "src"), dst, progress=Listen())
    assert not {f"layer {key}" for key in finished} & set(stages)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert contents(dst) == contents(made / "dst")


def test_a_finished_file_that_was_lost_is_made_again(made, tmp_path, monkeypatch):
    dst = tmp_path / "dst"
    with monkeypatch.context() as m:
        stop_at(m, 20)
        with pytest.raises(Stop):
            pack_local(made / "src", dst)
    (dst / "experts" / "base-000.safetensors").unlink()
    with (dst / "dense-00001-of-00002.safetensors").open("r+b") as file:
        file.truncate(100)
    pack_local(made / "src", dst)
    assert contents(dst) == contents(made / "dst")


def interrupted(made, dst, monkeypatch, step=12):
    with monkeypatch.context() as m:
        stop_at(m, step)
        with pytest.raises(Stop):
            pack_local(made / "src", dst)
    return dst


def test_other_settings_are_refused_with_both_shown(made, tmp_path, monkeypatch):
    for dst in (interrupted(made, tmp_path / "half", monkeypatch), copy(made / "dst", tmp_path / "whole")):
        before = contents(dst)
        with pytest.raises(
            PackError, match=r"native rows yes \(--native\), but this run has no \(--no-native\)"
        ):
            pack_local(made / "src", dst, native=False)
        assert {k: v for k, v in contents(dst).items() if not k.startswith(".moet/lock")} == {
            k: v for k, v in before.items() if not k.startswith(".moet/lock")
        }


def test_another_source_is_refused_with_both_shown(made, tmp_path, monkeypatch):
    from tests.generators import write_deepseek_v4

    write_deepseek_v4(tmp_path / "weights", seed=1)
    write_deepseek_v4(tmp_path / "config", swiglu_limit=7.0)
    first = json.loads(
        (interrupted(made, tmp_path / "a", monkeypatch) / ".moet" / "journal.json").read_text()
    )
    with pytest.raises(PackError) as other_weights:
        pack_local(tmp_path / "weights", tmp_path / "a")
    assert first["layers"]["0"]["first"] in str(other_weights.value) and "has " in str(other_weights.value)
    interrupted(made, tmp_path / "b", monkeypatch)
    for dst in (tmp_path / "b", copy(made / "dst", tmp_path / "c")):
        with pytest.raises(PackError, match="source fingerprint") as other_config:
            pack_local(tmp_path / "config", dst)
        assert first["settings"]["names"] in str(other_config.value)


def test_a_finished_pack_is_left_alone(made, tmp_path):
    dst = copy(made / "dst", tmp_path / "dst")
    (dst / ".moet").mkdir()  # killed between moet.json and the removal of the work folder
    (dst / ".moet" / "journal.json").write_text("{}")
    assert pack_local(made / "src", dst).was_finished
    assert contents(dst) == contents(made / "dst") and not (dst / ".moet").exists()


def test_second_packer_is_told_who_is_first(made, tmp_path):
    code = f"""
import sys, pathlib
from moet.pack import lock
with lock.hold(pathlib.Path({str(tmp_path / "dst")!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(PackError, match=f"another packer is writing here .process {holder.pid} on "):
        pack_local(made / "src", tmp_path / "dst")
    holder.kill()
    holder.wait()
    pack_local(made / "src", tmp_path / "dst")  # the lock died with its holder
    assert contents(tmp_path / "dst") == contents(made / "dst")


def test_a_lock_file_that_was_removed_is_not_the_lock(tmp_path):
    """The holder finishes and removes its lock while another process has it open: locking that file must not
    count."""
    with lock.hold(tmp_path):
        stale = os.open(tmp_path / ".moet" / "lock", os.O_RDWR)
        lock.remove(tmp_path)
    fcntl.flock(stale, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.hold(tmp_path), pytest.raises(PackError, match="another packer"), lock.hold(tmp_path):
        pass
    os.close(stale)


def test_a_damaged_journal_says_what_to_do(made, tmp_path, monkeypatch):
    dst = interrupted(made, tmp_path / "dst", monkeypatch)
    (dst / journal.NAME).write_text("{")
    with pytest.raises(PackError, match="Delete .* and pack again"):
        pack_local(made / "src", dst)
