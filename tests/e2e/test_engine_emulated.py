"""vLLM over the GPU's pager without a GPU: real scheduler, runner V2, drafter and host store; the kernels run in the emulator. What a GPU adds is in tests/gpu/test_engine.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")
from moet.checkpoint import LocalSource
from moet.pack.packer import pack
from tests.generators import write_deepseek_v3, write_qwen3_moe

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CASES = {"qwen3-moe": (write_qwen3_moe, ()), "qwen3-moe ahead": (write_qwen3_moe, ("--async",)), "deepseek-v3": (write_deepseek_v3, ()), "deepseek-v3 drafted": (write_deepseek_v3, ("--mtp",))}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    out = {}
    for name, (write, options) in CASES.items():
        folder = tmp_path_factory.mktemp(write.__name__)
        (folder / "source").mkdir()
        write(folder / "source", hidden=128, inter=64, experts=8, top_k=2)
        pack(LocalSource(folder / "source"), folder / "pack", native=False)
        command = [sys.executable, "-m", "tests.e2e.engine_emulated", str(folder / "pack"), str(folder / "out.json"), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        out[name] = json.loads((folder / "out.json").read_text())
    return out


@pytest.fixture(params=CASES)
def found(request, answers) -> dict:
    return answers[request.param]


def test_nothing_pages_before_the_device_is_armed(found):
    assert found["unarmed"] == found["before"] == 0


def test_the_slots_change_no_bit(found):
    assert found["counters"]["misses"] > 0 and found["counters"]["scan_misses"] > 0 and found["counters"]["arena_misses"] > 0
    assert found["cold"] == found["resident"]
    assert set(found["resident"]["reasons"]) == {"length"} and len({tuple(ids) for ids in found["resident"]["ids"]}) == 3


def test_a_row_that_cannot_be_read_fails_the_requests_and_the_next_are_right(found):
    assert found["eio"]["reasons"] == ["error"] * 3
    assert "Input/output error" in found["eio"]["why"] and "expert" in found["eio"]["why"]
    assert found["after"] == found["resident"]


def test_counters_and_heat_are_kept(found):
    assert found["shown"]["failed_rows"] > 0 and found["shown"]["steps"] > 0
    assert found["heat"] == 1


def test_steps_in_flight_change_nothing(answers):
    ahead, plain = answers["qwen3-moe ahead"], answers["qwen3-moe"]
    assert ahead["ahead"] and not plain["ahead"]
    assert ahead["resident"] == plain["resident"]


def test_drafts_change_no_token(answers):
    plain, drafted = answers["deepseek-v3"], answers["deepseek-v3 drafted"]
    assert drafted["resident"]["ids"] == plain["resident"]["ids"]
    assert drafted["counters"]["layers"] > plain["counters"]["layers"]
