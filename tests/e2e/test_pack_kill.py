"""SIGKILL at random moments of `moet pack`, then the same command again: the pack has the bytes of an
undisturbed one."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moet.pack.verify import verify
from tests.generators import write_deepseek_v4

PACK = [sys.executable, "-m", "moet", "pack", "--workers", "2", "--no-calibrate"]


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(source, bytes of its pack, seconds from the first file of a run to its end)"""
    root = tmp_path_factory.mktemp("kill")
    write_deepseek_v4(root / "src", hidden=512, inter=256, experts=16)
    process = subprocess.Popen(
        [*PACK, str(root / "src"), str(root / "dst")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    begin = appearance(process, root / "dst")
    assert process.wait() == 0
    return root / "src", contents(root / "dst"), time.monotonic() - begin


def appearance(process: subprocess.Popen, dst: Path) -> float:
    """When the run made its work folder: from then on there is something to lose."""
    while not (dst / ".moet").exists() and process.poll() is None:
        time.sleep(0.001)
    return time.monotonic()


def kill_and_finish(undisturbed, tmp_path, kills: int, seed: int) -> None:
    src, wanted, length = undisturbed
    rng = random.Random(seed)
    lost = finished = kept = 0
    for i in range(kills):
        dst = tmp_path / str(i)
        command = [*PACK, str(src), str(dst)]
        for _ in range(rng.choice((1, 1, 2))):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            appearance(process, dst)
            time.sleep(rng.random() * length)
            process.send_signal(signal.SIGKILL)
            finished += process.wait() == 0
        journal = dst / ".moet" / "journal.json"
        named = (
            json.loads(journal.read_text())["layers"]
            if journal.exists() and not (dst / "moet.json").exists()
            else {}
        )
        kept += len(named)
        # What is renamed and not in the journal is lost: at most one layer.
        lost = max(lost, len(list(dst.glob("experts/base-*"))) - len(named)) if named else lost
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert contents(dst) == wanted
        assert verify(dst).ok
        for path in sorted(dst.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert lost <= 1
    assert finished < kills, "every run ended before it was killed: nothing was tested"
    print(f"{kills} rounds: {finished} runs ended before the signal, {kept} finished layers were kept")


def test_5_kills(undisturbed, tmp_path):
    kill_and_finish(undisturbed, tmp_path, 5, seed=1)


@pytest.mark.slow
def test_50_kills(undisturbed, tmp_path):
    kill_and_finish(undisturbed, tmp_path, 50, seed=2)
