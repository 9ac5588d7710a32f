"""The `moet:` group from counter blocks, and the failure words that ranks share."""

import json
import os
import struct

import pytest

pytest.importorskip("vllm")
os.environ.setdefault("TRITON_INTERPRET", "1")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moet.config import MoetConfig
from moet.engine.vllm import entry, http, metrics
from moet.engine.vllm import run as runs
from moet.engine.vllm.failure import Words
from moet.engine.vllm.run import Run
from moet.store.counters import LATENCY_BUCKETS, MAGIC, NAMES


INFO = {"fingerprint": "f00", "activations": "int24", "row_format": "tcq2+sym2", "scheme": "tcq2-gptq"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = Run("model", True, MoetConfig(), str(tmp_path))
    monkeypatch.setattr(entry, "RUNS", [Run("older", True, MoetConfig(precision="native"), "/nowhere"), run])
    return run


def write_rank(run, rank, budget, latency=(0,) * LATENCY_BUCKETS, **words):
    values = [words.get(name, 0) for name in NAMES]
    count = len(NAMES) + LATENCY_BUCKETS
    run.counters_path(rank).write_bytes(MAGIC + struct.pack(f"<{count + 1}Q", count, *values, *latency))
    (run.counters_dir / f"rank-{rank}.json").write_text(json.dumps(INFO | {"budget_bytes": budget}))


def samples():
    registry = CollectorRegistry()
    registry.register(metrics.MoetCollector())
    text = generate_latest(registry).decode()
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def test_nothing_is_shown_before_a_rank_has_started(run):
    assert samples() == {}


def test_every_rank_is_shown(run):
    latency = [0] * LATENCY_BUCKETS
    latency[3], latency[-1] = 5, 2
    write_rank(run, 0, 1000, latency, hits=7, misses=3, bytes_direct=64, bytes_buffered=8, arena_bytes=900, wait_us=1_500_000)
    write_rank(run, 10, 0, hits=1, arena_bytes=500)
    found = samples()
    assert found["moet:expert_hits_total", (("rank", "0"),)] == 7
    assert found["moet:expert_hits_total", (("rank", "10"),)] == 1
    assert found["moet:expert_misses_total", (("rank", "0"),)] == 3
    assert found["moet:disk_read_bytes_total", (("path", "direct"), ("rank", "0"))] == 64
    assert found["moet:disk_read_bytes_total", (("path", "buffered"), ("rank", "0"))] == 8
    assert found["moet:read_wait_seconds_total", (("rank", "0"),)] == 1.5
    assert found["moet:arena_budget_bytes", (("rank", "0"),)] == 1000
    assert found["moet:arena_budget_bytes", (("rank", "10"),)] == 500  # no budget was set: all rows
    assert found["moet:read_latency_seconds_bucket", (("le", "8e-06"), ("rank", "0"))] == 0
    assert found["moet:read_latency_seconds_bucket", (("le", "1.6e-05"), ("rank", "0"))] == 5  # [8, 16) us
    assert found["moet:read_latency_seconds_bucket", (("le", "+Inf"), ("rank", "0"))] == 7
    info = {k[1]: v for k, v in found.items() if k[0] == "moet:info"}
    labels = {"precision": "base", "source": "pack"} | INFO
    assert info == {tuple(sorted(labels.items())): 1}


def test_the_model_card_says_what_the_ranks_have_opened(run):
    write_rank(run, 0, 1000)
    assert http.mode() == {
        "precision": "base", "activations": "int24", "experts": "pack", "row_format": "tcq2+sym2", "scheme": "tcq2-gptq",
    }  # fmt: skip


def test_every_counter_of_the_block_has_a_home():
    shown = {word for _, words in metrics.COUNTERS.values() for word in words} | {word for _, word in metrics.GAUGES.values()} | {"wait_us"}
    assert shown <= set(NAMES)
    assert set(NAMES) - shown == {"reads", "short_reads", "rows_put", "files_direct", "files_buffered", "io_threads"}


def test_failure_words_are_shared(tmp_path):
    ours, theirs = Words(str(tmp_path)), Words(str(tmp_path))
    assert theirs.counts(2) == (0, 0)
    ours.add(1, "layer 3, expert 5: checksum")
    ours.add(1, "Ärger " * 500)
    assert theirs.counts(2) == (0, 2)
    assert theirs.message(1).startswith("Ärger Ärger") and theirs.message(0) == ""


def test_a_named_run_folder_forgets_the_run_before(tmp_path):
    settings = MoetConfig(run_dir=str(tmp_path / "here"))
    folder = runs.make_run_dir(settings, os.getpid())
    Words(folder).add(0, "old")
    runs.make_run_dir(settings, os.getpid() + 1)  # an API server of several does not touch it
    assert Words(folder).count(0) == 1
    runs.make_run_dir(settings, os.getpid())
    assert Words(folder).count(0) == 0


def test_folders_of_dead_processes_go(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.tempfile, "gettempdir", lambda: str(tmp_path))
    dead, other = tmp_path / f"{runs.PREFIX}999999999-0", tmp_path / "moet-demo-x"
    dead.mkdir()
    other.mkdir()
    mine = runs.make_run_dir(MoetConfig(), os.getpid())
    assert not dead.exists() and other.exists() and os.path.isdir(mine)
    assert oct(os.stat(mine).st_mode & 0o777) == "0o700"
