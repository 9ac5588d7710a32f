"""The GPU path of the engine, as far as it is decided on the host: settings, shares of memory, graphs, steps, refusals, failures and counters."""

import json
import os
import re
import struct
from importlib import resources
from types import SimpleNamespace as Fake

import pytest

pytest.importorskip("vllm")
os.environ.setdefault("TRITON_INTERPRET", "1")
import torch
from prometheus_client import CollectorRegistry, generate_latest
from vllm.v1.worker.gpu_worker import Worker

from moet.cli.serve import gpu_budget
from moet.config import MoetConfig
from moet.engine import launch
from moet.engine.vllm import entry, failure, graphs, metrics, refuse_gpu, step
from moet.engine.vllm import run as runs
from moet.engine.vllm.failure import LATE, Words
from moet.engine.vllm.memory import GIB, Needs, split
from moet.engine.vllm.run import Run
from moet.engine.vllm.watch import Watch
from moet.engine.vllm.worker import MoetWorker
from moet.errors import ConfigError, EngineError
from moet.store.counters import LATENCY_BUCKETS, MAGIC, NAMES
from moet.store.failures import STRIDE


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gpu_gib": -1}, "moet.gpu_gib: expected GiB"),
        ({"gpu_gib": True}, "moet.gpu_gib: expected GiB"),
        ({"gpu_percent": 101}, "moet.gpu_percent: expected 0 to 100"),
        ({"gpu_gib": 1, "gpu_percent": 10}, "moet.gpu_gib and moet.gpu_percent: expected one of them"),
        ({"fetch_blocks": 0}, "moet.fetch_blocks: expected 1 to 64"),
        ({"ring_rows": 2.5}, "moet.ring_rows: expected 1 to 1024"),
        ({"prefill_activations": "fp8"}, "moet.prefill_activations: expected one of"),
        ({"wait_limit_s": 0}, "moet.wait_limit_s: expected 0.1 to 3600 seconds"),
    ],
)
def test_settings_are_refused_by_name(values, says):
    with pytest.raises(ConfigError, match=says):
        MoetConfig.from_dict(values)


def test_gpu_bytes():
    assert MoetConfig().gpu_bytes(1000) is None
    assert MoetConfig(gpu_percent=25).gpu_bytes(1000) == 250
    assert MoetConfig(gpu_gib=0.5).gpu_bytes(GIB) == GIB // 2
    assert MoetConfig(gpu_gib=2).gpu_bytes(GIB) == GIB


@pytest.mark.parametrize(("gpu", "values"), [("", {}), ("20%", {"gpu_percent": 20.0}), ("14.5", {"gpu_gib": 14.5})])
def test_gpu_budgets_of_the_command_line(gpu, values):
    assert gpu_budget(gpu) == values


@pytest.mark.parametrize("gpu", ["0%", "101%", "x%", "lots"])
def test_gpu_budgets_that_are_none(gpu):
    with pytest.raises(ConfigError, match="--gpu"):
        gpu_budget(gpu)


def test_a_server_on_a_gpu_has_64_streams_unless_the_user_says(monkeypatch):
    monkeypatch.setattr(launch, "installed", lambda: "cuda")
    command = launch.build("/m", "m", {}, []).command
    assert command[command.index("--max-num-seqs") + 1] == "64" and "--enforce-eager" not in command
    assert launch.build("/m", "m", {}, ["--max-num-seqs=8"]).command.count("--max-num-seqs") == 0


# --- memory

NEEDS = Needs(rows=60 * GIB, least=GIB, kv_all=20 * GIB, kv_one=2 * GIB)


@pytest.mark.parametrize(
    ("free", "explicit", "kv", "slots"),
    [
        (40, None, 20, 20),  # the KV cache has what its requests can need, the slots the rest
        (24, None, 12, 12),  # but at most half
        (3, None, 2, 1),  # and at least one request
        (100, None, 40, 60),  # what rows do not need is the KV cache's
        (40, 10, 30, 10),
        (40, 38, 2, 38),
        (100, 90, 40, 60),  # never more than all rows
    ],
)
def test_shares(free, explicit, kv, slots):
    found = split(free * GIB, NEEDS, explicit and explicit * GIB)
    assert (found.kv, found.slots) == (kv * GIB, slots * GIB)


@pytest.mark.parametrize(("free", "explicit", "says"), [(40, 39, "Lower moet.gpu_gib"), (2, None, "Lower --max-model-len"), (40, 0.5, "expected at least 1.00 GiB")])
def test_shares_that_do_not_fit(free, explicit, says):
    with pytest.raises(EngineError, match=says):
        split(free * GIB, NEEDS, explicit and int(explicit * GIB))


class WorkerOfVllm:
    """What vLLM's worker does between load and capture, in bytes of a GPU that has 100 GiB."""

    def __init__(self, monkeypatch, fixed=0, kv_taken=None):
        self.free, self.kv_taken, self.asked = 40 * GIB, kv_taken, []
        spec = Fake(max_memory_usage_bytes=lambda _: 2 * GIB)
        monkeypatch.setattr(Worker, "determine_available_memory", lambda _: fixed or 40 * GIB)
        monkeypatch.setattr(Worker, "initialize_from_config", lambda _, config: setattr(self, "free", self.free - self.kv_taken))
        monkeypatch.setattr(Worker, "get_kv_cache_spec", lambda _: {"attn": spec})
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None, raising=False)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (self.free, 100 * GIB), raising=False)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * GIB)

    def worker(self, fixed=0, **settings):
        worker = MoetWorker.__new__(MoetWorker)
        worker.cache_config, worker.vllm_config, worker.scheduler_config = Fake(kv_cache_memory_bytes=fixed or None), None, Fake(max_num_seqs=10)
        worker.init_snapshot, worker.requested_memory, worker.total_consumed = Fake(free_memory=90 * GIB), 80 * GIB, 0
        worker.moet = Fake(
            run=Fake(settings=MoetConfig(**settings)), rows_bytes=60 * GIB, allocate=lambda *a: self.asked.append(a),
            needs=lambda kv_all, kv_one: Needs(60 * GIB, GIB, kv_all, kv_one),
        )  # fmt: skip
        return worker


GROUPS = Fake(kv_cache_groups=[Fake(kv_cache_spec=Fake(uses_slot_mapping=False), layer_names=["mamba"]), Fake(kv_cache_spec=Fake(uses_slot_mapping=True), layer_names=["attn"])])


def test_the_worker_gives_the_slots_what_the_kv_cache_leaves(monkeypatch):
    vllm = WorkerOfVllm(monkeypatch, kv_taken=19 * GIB)   # whole blocks, and no more than the smallest rank has
    worker = vllm.worker()
    assert worker.determine_available_memory() == 20 * GIB
    worker.initialize_from_config(GROUPS)
    assert vllm.asked == [(21 * GIB, 19 * GIB, frozenset({"attn"}))]
    assert worker.total_consumed == 21 * GIB


def test_the_worker_takes_what_is_asked_for_off_the_kv_cache(monkeypatch):
    vllm = WorkerOfVllm(monkeypatch, kv_taken=29 * GIB)
    worker = vllm.worker(gpu_gib=10)
    assert worker.determine_available_memory() == 30 * GIB
    worker.initialize_from_config(GROUPS)
    assert vllm.asked == [(10 * GIB, 29 * GIB, frozenset({"attn"}))]


def test_a_kv_cache_of_a_given_size_leaves_the_rest_of_the_utilization(monkeypatch):
    vllm = WorkerOfVllm(monkeypatch, fixed=8 * GIB, kv_taken=8 * GIB)
    worker = vllm.worker(fixed=8 * GIB)
    assert worker.determine_available_memory() == 8 * GIB
    worker.initialize_from_config(GROUPS)
    # 80 requested, 50 gone before, 1 for the largest step, 1 for graphs, 8 for the KV cache
    assert vllm.asked == [(20 * GIB, 8 * GIB, frozenset({"attn"}))]


def test_no_share_is_more_than_there_is():
    for free in range(3, 120):
        found = split(free * GIB, NEEDS, None)
        assert found.kv + found.slots == free * GIB and NEEDS.least <= found.slots <= NEEDS.rows and found.kv >= NEEDS.kv_one


# --- graphs


def arguments(mode=None, eager=False, level=2):
    return Fake(compilation_config=Fake(cudagraph_mode=mode), enforce_eager=eager, optimization_level=level)


def test_graphs_are_whole_decode_steps_unless_the_user_chose():
    plain = arguments()
    assert graphs.set_default(plain, "FDO") and plain.compilation_config.cudagraph_mode == "FDO"
    for chosen in (arguments("PIECEWISE"), arguments(eager=True), arguments(level=0)):
        before = chosen.compilation_config.cudagraph_mode
        assert not graphs.set_default(chosen, "FDO") and chosen.compilation_config.cudagraph_mode == before


@pytest.mark.parametrize(("mode", "fine"), [("NONE", True), ("FULL_DECODE_ONLY", True), ("FULL", False), ("PIECEWISE", False), ("FULL_AND_PIECEWISE", False)])
def test_graphs_with_prefills_in_them_are_refused(mode, fine):
    found = graphs.problems(Fake(compilation_config=Fake(cudagraph_mode=Fake(name=mode))))
    assert found == [] if fine else f"cudagraph_mode {mode}" in found[0]


# --- steps

LIMITS = (16, 64, frozenset({"attn"}))


def context(longest, slots=(), **more):
    metadata = None if longest is None else {"attn": Fake(max_query_len=longest), "indexer": Fake()}
    return Fake(attn_metadata=metadata, slot_mapping=dict(slots), additional_kwargs={}, **more)


SLOTS = torch.arange(256)


@pytest.mark.parametrize(("longest", "count", "scan"), [(1, 4, False), (16, 64, False), (17, 64, True), (1, 65, True), (9, 200, True)])
def test_a_long_query_or_a_large_batch_makes_a_scan(longest, count, scan):
    found = step.describe_on_device(context(longest, [("attn", SLOTS)]), *LIMITS, count, False)
    assert found.scan is scan and found.kv_slots.data_ptr() == SLOTS.data_ptr() and len(found.kv_slots) == count


def test_a_captured_step_is_never_a_scan():
    assert not step.describe_on_device(context(17, [("attn", SLOTS)]), *LIMITS, 64, True).scan
    with pytest.raises(EngineError, match="a CUDA graph of 65 rows: expected decode steps only, of at most 64"):
        step.describe_on_device(context(1, [("attn", SLOTS)]), *LIMITS, 65, True)


def test_slots_come_from_layers_that_have_some():
    nowhere = torch.full((256,), -1)
    found = step.describe_on_device(context(1, [("mamba", nowhere), ("attn", SLOTS)]), *LIMITS, 4, False)
    assert found.kv_slots.tolist() == [0, 1, 2, 3]
    with pytest.raises(EngineError, match="a step of 4 rows: expected the KV slot of each"):
        step.describe_on_device(context(1, [("mamba", nowhere)]), *LIMITS, 4, False)
    with pytest.raises(EngineError, match="a step of 300 rows"):
        step.describe_on_device(context(1, [("attn", SLOTS)]), *LIMITS, 300, False)


def test_profiling_has_no_tokens():
    assert step.describe_on_device(context(None), *LIMITS, 4, False).kv_slots is None


# --- refusals


def config(**changes):
    model = Fake(dtype=torch.bfloat16, enable_cumem_allocator=False, architectures=["DeepseekV3ForCausalLM"])
    whole = Fake(
        model_config=model, cache_config=Fake(kv_sharing_fast_prefill=False), parallel_config=Fake(worker_cls=refuse_gpu.WORKER), use_v2_model_runner=True,
        compilation_config=Fake(cudagraph_mode=Fake(name="FULL_DECODE_ONLY")), kv_transfer_config=None, attention_config=Fake(hisparse_config=None),
        speculative_config=None,
    )  # fmt: skip
    for path, value in changes.items():
        target = whole
        *parents, last = path.split("__")
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return whole


def refused(changes=None, settings=None, version="0.33"):
    return refuse_gpu.problems(config(**(changes or {})), Run("m", True, MoetConfig(**(settings or {})), "/dev/shm/x"), version)


def test_a_plain_start_is_not_refused():
    assert refused() == []
    assert refused({"speculative_config": Fake(method="mtp")}) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_config__dtype": torch.float32}, "--dtype float32: experts take bfloat16 on a GPU"),
        ({"use_v2_model_runner": False}, "model runner V1"),
        ({"parallel_config__worker_cls": "other.Worker"}, "--worker-cls other.Worker"),
        ({"compilation_config__cudagraph_mode": Fake(name="PIECEWISE")}, "cudagraph_mode PIECEWISE"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"kv_transfer_config": Fake()}, "--kv-transfer-config"),
        ({"attention_config__hisparse_config": Fake()}, "hisparse"),
        ({"model_config__enable_cumem_allocator": True}, "--enable-cumem-allocator"),
        ({"speculative_config": Fake(method="dspark")}, "--speculative-config method dspark"),
    ],
)
def test_what_does_not_work_on_a_gpu_is_refused_by_name(changes, says):
    found = refused(changes)
    assert len(found) == 1 and says in found[0]


@pytest.mark.parametrize(("architecture", "capability", "count"), [("DeepseekV4ForCausalLM", (8, 9), 1), ("GlmMoeDsaForCausalLM", (8, 0), 1), ("DeepseekV4ForCausalLM", (12, 0), 0),
                                                                  ("DeepseekV3ForCausalLM", (8, 6), 0)])  # fmt: skip
def test_sparse_attention_wants_a_gpu_that_vllm_has_it_for(monkeypatch, architecture, capability, count):
    monkeypatch.setattr(refuse_gpu.current_platform, "get_device_capability", lambda: capability)
    found = refused({"model_config__architectures": [architecture]})
    assert len(found) == count and all("sparse attention for 9.0 and newer" in text for text in found)


def test_other_versions_and_the_cpus_activations_are_refused():
    assert "vllm 0.32 on a GPU: expected 0.33" in refused(version="0.32")[0]
    assert "moet.activations int8" in refused(settings={"activations": "int8"})[0]


def test_a_run_folder_of_a_gpu_is_on_tmpfs(tmp_path):
    with pytest.raises(EngineError, match="moet.run_dir .*: expected a folder under /dev/shm"):
        runs.make_run_dir(MoetConfig(run_dir=str(tmp_path)), os.getpid(), "cuda")
    made = runs.make_run_dir(MoetConfig(), os.getpid(), "cuda")
    assert made.startswith("/dev/shm/moet-")
    os.rmdir(made)


# --- failures


def device_words(tmp_path, *counts):
    page = bytearray(4096)
    for rank, count in enumerate(counts):
        struct.pack_into("<I", page, rank * STRIDE, count)
    (tmp_path / "failures.gpu").write_bytes(page)


def set_word(tmp_path, rank, count):
    with open(tmp_path / "failures.gpu", "r+b") as file:
        file.seek(rank * STRIDE)
        file.write(struct.pack("<I", count))


def test_what_a_gpu_counts_is_a_failure(tmp_path):
    words = Words(str(tmp_path))
    assert words.counts(2) == (0, 0)
    device_words(tmp_path, 0, 3)
    assert words.counts(2) == (0, 3)
    Words(str(tmp_path)).tell(1, "layer 3, expert 5: EIO", 3)
    assert words.message(1) == "layer 3, expert 5: EIO"


def test_a_failure_that_nobody_explains_is_a_wait_that_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "TELL_SECONDS", 0.05)
    device_words(tmp_path, 1)
    words = Words(str(tmp_path))
    words.tell(0, "an older one", 0)
    assert words.message(0) == LATE and Words(str(tmp_path)).message(0) == LATE


def test_rows_that_failed_ahead_are_no_requests_failure(tmp_path):
    device_words(tmp_path, 2)
    words = Words(str(tmp_path))
    words.forgive(0)
    assert words.counts(1) == (0,)
    set_word(tmp_path, 0, 3)
    assert words.counts(1) == (1,)


class Store:
    mailbox = 1

    def __init__(self):
        self.io_errors = self.checksum_failures = 0
        self.told = None

    def counters(self):
        return self

    def failure_text(self):
        return "row 7: checksum"

    def set_heat(self, heat):
        self.told = heat


def test_the_watch_says_why(tmp_path):
    device_words(tmp_path, 0)
    words, store = Words(str(tmp_path)), Store()
    gpu = Fake(timeouts=0)
    watch = Watch(Fake(heat=lambda: "heat", counters=lambda: gpu), store, words, 0, tmp_path / "c", None)
    set_word(tmp_path, 0, 1)
    store.checksum_failures = 1
    watch.explain()
    assert words.message(0) == "row 7: checksum"
    set_word(tmp_path, 0, 2)
    gpu.timeouts = 1
    watch.explain()
    assert words.message(0) == LATE
    watch.tell_store()
    assert store.told == "heat"


class Scheduler:
    """As much of vLLM's scheduler as a failure touches."""

    def __init__(self, tmp_path, **in_flight):
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        self.vllm_config = Fake(additional_config=Run("m", True, MoetConfig(), str(tmp_path)), parallel_config=Fake(tensor_parallel_size=1))
        self.requests = {i: Fake(request_id=i, status=RequestStatus.RUNNING, num_in_flight_tokens=n) for i, n in in_flight.items()}
        self.pause_state, self.evicted, self.kv_cache_config = PauseState.UNPAUSED, set(), Fake(num_blocks=4)
        self.kv_cache_manager = Fake(evict_blocks=self.evicted.update)

    def set_pause_state(self, state):
        self.pause_state = state

    def finish_requests(self, ids, status):
        return [self.requests.pop(i) for i in sorted(ids) if i in self.requests]


def output(**tokens):
    return Fake(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))


def test_nothing_is_scheduled_until_the_steps_in_flight_are_done(tmp_path):
    from vllm.v1.core.sched.interface import PauseState

    scheduler = Scheduler(tmp_path, a=2, b=1)  # a is in this step and the next one, b in the next one
    words = Words(str(tmp_path))
    assert failure.newly_failed(scheduler) == ""
    words.add(0, "EIO")
    assert failure.newly_failed(scheduler) == "EIO"
    assert len(failure.fail_in_flight(scheduler, output(a=1), "EIO")) == 2
    assert scheduler.evicted == {0, 1, 2, 3} and scheduler.pause_state == PauseState.PAUSED_ALL
    assert failure.draining(scheduler) and failure.drain(scheduler, output(a=1, b=1))
    words.add(0, "EIO")  # the next step failed too: nobody new is hurt
    assert failure.newly_failed(scheduler) == "EIO" and failure.fail_in_flight(scheduler, output(a=1, b=1), "EIO") == []
    failure.resume(scheduler)
    assert scheduler.pause_state == PauseState.UNPAUSED and not failure.draining(scheduler)


def test_a_failure_with_nothing_behind_it_pauses_nothing(tmp_path):
    scheduler = Scheduler(tmp_path, a=1)
    Words(str(tmp_path)).add(0, "EIO")
    assert failure.newly_failed(scheduler) == "EIO"
    assert len(failure.fail_in_flight(scheduler, output(a=1), "EIO")) == 1
    assert not failure.draining(scheduler)


# --- counters


def test_device_counters_are_shown(tmp_path, monkeypatch):
    run = Run("model", True, MoetConfig(), str(tmp_path))
    monkeypatch.setattr(entry, "RUNS", [run])
    words = [0] * len(NAMES)
    run.counters_path(0).write_bytes(MAGIC + struct.pack(f"<{len(NAMES) + LATENCY_BUCKETS + 1}Q", len(NAMES) + LATENCY_BUCKETS, *words, *[0] * LATENCY_BUCKETS))
    info = {"fingerprint": "f", "activations": "bf16", "row_format": "sym2", "scheme": "", "budget_bytes": 0, "gpu_slot_bytes": 9, "gpu_coverage": 0.25}
    (run.counters_dir / "rank-0.json").write_text(json.dumps(info))

    def shown():
        registry = CollectorRegistry()
        registry.register(metrics.MoetCollector())
        return generate_latest(registry).decode()

    assert "moet:gpu_" not in shown()
    run.device_counters_path(0).write_text(json.dumps({key: 4 for _, key, _ in metrics.DEVICE_COUNTERS.values()} | {"fetch_nanoseconds": 1_500_000_000}))
    text = shown()
    assert 'moet:gpu_fetched_bytes_total{rank="0"} 4.0' in text and 'moet:gpu_fetch_seconds_total{rank="0"} 1.5' in text
    assert 'moet:gpu_coverage{rank="0"} 0.25' in text and 'activations="bf16"' in text


def test_every_device_counter_is_shown():
    source = (resources.files("moet") / "kernels/paging/state.cuh").read_text()
    names = re.findall(r"\bk(\w+),", re.search(r"enum Counter : i32 \{(.*?)\};", source, re.DOTALL)[1])
    snake = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in names}
    assert len(snake) == 15 and {key for _, key, _ in metrics.DEVICE_COUNTERS.values()} == snake
