"""vLLM with full decode graphs on the GPU, over the demo's pack: the same text whatever the slots hold, with drafts too; and rows that do not come."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:   # importing it takes seconds, and is the children's
    pytest.skip("needs vLLM", allow_module_level=True)
from moet.checkpoint import LocalSource
from moet.pack.packer import pack

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 140
RUNS = {"plain": ("--faults",), "mtp": ("--mtp",), "wide": ("--wide",), "native": ("--native",)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, request) -> dict[str, dict]:
    """All engines at once: most of their time is vLLM's start. What they say goes to the terminal as it comes."""
    if request.getfixturevalue("emulated"):
        pytest.skip("vLLM's GPU worker needs a GPU")
    folder = tmp_path_factory.mktemp("engine")
    pack(LocalSource(ROOT / "demo" / "model"), folder / "pack")
    running, said = {}, dict.fromkeys(RUNS, 0)
    for name, options in RUNS.items():
        command = [sys.executable, "-u", str(ROOT / "tests/gpu/engine_child.py"), str(folder / "pack"), str(folder / f"{name}.json"), *options]
        with (folder / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    capture, end = request.config.pluginmanager.getplugin("capturemanager"), time.monotonic() + SECONDS
    while any(p.poll() is None for p in running.values()) and time.monotonic() < end:
        time.sleep(0.5)
        for name in RUNS:
            lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
            with capture.global_and_fixture_disabled():
                for line in lines[said[name] :]:
                    if line.startswith("engine:"):
                        print(f"\n  {name}: {line}", end="", flush=True)
            said[name] = len(lines)
    for process in running.values():
        process.kill()
        process.wait()
    logs = {name: (folder / f"{name}.log").read_text(errors="replace") for name in RUNS}
    for name in RUNS:
        assert (folder / f"{name}.json").exists(), f"{name}: {logs[name][-6000:]}"
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}


@pytest.fixture(scope="module")
def plain(answers) -> dict:
    return answers["plain"]


@pytest.fixture(scope="module")
def drafted(answers) -> dict:
    return answers["mtp"]


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


@pytest.mark.parametrize("coverage", ["cold", "quarter"])
@pytest.mark.parametrize("case", ["64", "shared", "cached", "chunked"])
def test_many_requests_cached_prefixes_and_chunks(answers, case, coverage):
    found, resident = answers["wide"][f"wide {coverage}"][case], answers["wide"]["wide resident"][case]
    assert found == resident
    assert set(resident["reasons"]) == {"length"} and len({tuple(ids) for ids in resident["ids"]}) > 1


def test_native_rows_come_the_same_way(answers, plain):
    native = answers["native"]
    assert native["cold"] == native["resident"] and native["counters"]["misses"] > 0
    assert native["resident"]["ids"] != plain["resident"]["ids"]
