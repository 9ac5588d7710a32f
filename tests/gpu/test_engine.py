"""vLLM with full decode graphs on the GPU, over the demo's pack: the same text whatever the slots hold, with drafts too; and rows that do not come."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:   # importing it takes seconds, and is the children's
    pytest.skip("needs vLLM", allow_module_level=True)
from moet.checkpoint import LocalSource
from moet.pack.packer import pack

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240


def child(folder: Path, name: str, *options: str) -> dict:
    out = folder / f"{name}.json"
    command = [sys.executable, str(ROOT / "tests/gpu/engine_child.py"), str(folder / "pack"), str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and out.exists(), (done.stdout + done.stderr)[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    if request.getfixturevalue("emulated"):
        pytest.skip("vLLM's GPU worker needs a GPU")
    made = tmp_path_factory.mktemp("engine")
    pack(LocalSource(ROOT / "demo" / "model"), made / "pack", native=False)
    return made


@pytest.fixture(scope="module")
def plain(folder) -> dict:
    return child(folder, "plain", "--faults")


@pytest.fixture(scope="module")
def drafted(folder) -> dict:
    return child(folder, "mtp", "--mtp")


def test_decode_steps_are_captured_and_nothing_pages_before(plain):
    assert plain["mode"] == "FULL_DECODE_ONLY"
    assert plain["armed_before"] == 0
    assert plain["coverage"] == 1.0


def test_the_slots_do_not_change_the_text(plain):
    assert plain["counters"]["misses"] > 0 and plain["counters"]["arena_misses"] > 0
    assert plain["cold"] == plain["resident"]
    assert set(plain["resident"]["reasons"]) == {"length"}
    assert len({tuple(ids) for ids in plain["resident"]["ids"]}) == 3


def test_drafts_do_not_change_the_text(plain, drafted):
    assert drafted["cold"] == drafted["resident"]
    assert drafted["resident"]["ids"] == plain["resident"]["ids"]


@pytest.mark.parametrize("fault", ["delay", "short"])
def test_reads_that_are_late_or_short_change_nothing(plain, fault):
    assert plain[fault] == plain["resident"]
    assert plain["failures_before"] == 0


@pytest.mark.parametrize(("fault", "why"), [("eio", "Input/output error"), ("flip", "checksum")])
def test_a_row_that_cannot_be_read_fails_the_requests_and_the_next_are_right(plain, fault, why):
    assert "error" in plain[fault]["reasons"] and why in plain[fault]["why"]
    for ids, expected in zip(plain[fault]["ids"], plain["resident"]["ids"], strict=True):
        assert ids == expected[: len(ids)]   # what came before the failure was right
    assert plain[f"after_{fault}"] == plain["resident"]


def test_a_dead_reader_fails_requests_and_not_the_engine(plain):
    assert "error" in plain["dead"]["reasons"] and "wait_limit_s" in plain["dead"]["why"]
    for found in (plain["dead"], plain["still_dead"]):
        for ids, expected in zip(found["ids"], plain["resident"]["ids"], strict=True):
            assert ids == expected[: len(ids)]
