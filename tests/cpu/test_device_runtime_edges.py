"""DeviceRuntime where callers go wrong or things are taken away: sizes, orders of layers, ids, launches that fail, a store that is closed."""

import ctypes
from dataclasses import replace

import pytest
import torch

from moet.errors import ConfigError, StoreError
from moet.kernels.paging.state import MAX_EXPERTS, MAX_STAGING
from moet.moe import device
from moet.moe.slots import ClassNeeds, minimum_bytes, split
from tests.cpu import test_device_runtime as whole
from tests.cpu.test_device_runtime import EXPERTS, LAYERS, TOP_K, Served, equal, trace_of

sources = whole.sources


@pytest.fixture
def wanted(sources):
    """The answers where every row has a slot."""

    def answers(trace, scan=False):
        with Served(sources[0]) as served:
            served.runtime.allocate()
            served.runtime.arm()
            return served.run(trace, scan)

    return answers


def bytes_of(sources) -> int:
    return sum(s.experts * s.geometry.row_bytes for s in sources[0].values())


# --- sizes


def test_fewer_slots_than_captured_waves_suffice_for_are_refused(sources, wanted):
    """All rows had slots, one wave a layer was captured: a layer that takes more would leave the others' results unwritten."""
    trace = trace_of(1, [5])
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        with pytest.raises(ConfigError, match="captured graphs count on"):
            served.runtime.resize(served.runtime.gpu_bytes_minimum())
        assert equal(served.run(trace), wanted(trace))


def test_a_size_that_does_not_fit_changes_nothing(sources, wanted):
    trace = trace_of(2, [3, 5])
    total = bytes_of(sources)
    with Served(sources[0]) as served:
        runtime = served.runtime
        runtime.allocate(total // 2, runtime.gpu_bytes_minimum())
        runtime.arm()
        answers = served.run(trace)
        before, tables = runtime.slots, bytes(runtime.tables._classes.numpy())
        for size in (0, total // 2 + total // 4):
            with pytest.raises(ConfigError, match="expected at most"):
                runtime.resize(size)
            assert runtime.slots == before and bytes(runtime.tables._classes.numpy()) == tables
        assert equal(served.run(trace), answers) and equal(answers, wanted(trace))
        with pytest.raises(ConfigError, match="once"):
            runtime.allocate(total // 2)


def test_slots_can_be_asked_for_again_when_there_was_no_memory(sources, wanted, monkeypatch):
    trace = trace_of(1, [3])
    with Served(sources[0]) as served:
        runtime, room = served.runtime, [1]
        arrays = device.Tables.allocate.__globals__["_Arrays"]

        def scarce(*arguments):
            if not room:
                raise torch.OutOfMemoryError("no memory for the second class")
            room.pop()
            return arrays(*arguments)

        monkeypatch.setitem(device.Tables.allocate.__globals__, "_Arrays", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            runtime.allocate()
        with pytest.raises(ConfigError, match=r"allocate\(\) before"):
            served.run(trace)
        room += [1] * 4
        runtime.allocate()
        runtime.arm()
        assert equal(served.run(trace), wanted(trace))


@pytest.mark.parametrize("rows", range(1, 12))
def test_the_minimum_is_never_more_than_all_rows(rows):
    needs = [ClassNeeds(4096, rows, rows, min(8, rows), 2), ClassNeeds(8192, 64, 32, 8, 4)]
    least, everything = minimum_bytes(needs), sum(n.slot_bytes * n.rows for n in needs)
    assert least <= everything and minimum_bytes(needs[:1]) <= 4096 * rows
    for budget in range(least, everything + 1, 4096):
        slots = split(needs, budget, 32)
        assert sum(n.slot_bytes * s.total for n, s in zip(needs, slots, strict=True)) <= budget


def test_staging_is_what_the_kernels_hold():
    slots = split([ClassNeeds(4096, 512 * 128, 512, 512, 128 * 32)], 4096 * 512 * 64, 32)
    assert slots[0].staging == MAX_STAGING


def test_more_than_the_kernels_count_is_refused(sources):
    few = {2: sources[0][2]}
    with Served(few) as served:
        make = {"activation": whole.ACTIVATION, "top_k": TOP_K, "device": torch.device("cpu"), "decode_tokens": 1, "modules": served.runtime._modules}
        device.DeviceRuntime(served.store, max_tokens=1000, **make)
        with pytest.raises(ConfigError, match=r"max_tokens \* top_k of at most 1048575, .* found 1048576"):
            device.DeviceRuntime(served.store, max_tokens=1 << 20, **make | {"top_k": 1})
        served.store.layers[2] = replace(served.store.layers[2], experts=MAX_EXPERTS + 1)
        with pytest.raises(ConfigError, match="layer 2: expected at most 1024 experts, .* found 1025"):
            device.DeviceRuntime(served.store, max_tokens=8, **make)


# --- scans


def paged(sources, served) -> None:
    served.runtime.allocate(served.runtime.gpu_bytes_minimum() + bytes_of(sources) // 8)
    served.runtime.arm()


def test_decoding_between_two_layers_of_a_scan(sources, wanted):
    """What the scan of layer 2 made ready for layer 3 says where rows were; decoding moves them."""
    long, short = trace_of(1, [60], seed=3), trace_of(4, [2], seed=4)
    right, right_short = wanted(long, scan=True), wanted(short)
    with Served(sources[0]) as served:
        paged(sources, served)
        assert equal(served.run(short), right_short)
        assert equal(served.run(long[:1], scan=True), right[:1])
        assert equal(served.run(short[::-1]), right_short[::-1])
        assert equal(served.run(long[1:], scan=True), right[1:])
        assert served.runtime.counters().failed_rows == 0


def test_a_scan_that_began_unarmed(sources, wanted):
    long = trace_of(1, [60], seed=3)
    right = wanted(long, scan=True)
    with Served(sources[0]) as served:
        paged(sources, served)
        served.runtime.arm(False)
        assert not served.run(long[:1], scan=True)[0].any()
        served.runtime.arm()
        assert equal(served.run(long[1:], scan=True), right[1:])
        assert served.runtime.counters().failed_rows == 0


class Breaks:
    """A module whose n-th launch of a kernel raises."""

    def __init__(self, module, kernel: str, n: int) -> None:
        self.module, self.kernel, self.left = module, kernel, n

    def launch(self, kernel, *arguments, **named) -> None:
        if kernel == self.kernel:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("launch failed")
        self.module.launch(kernel, *arguments, **named)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_scan_that_breaks_off_is_begun_anew(sources, wanted, n):
    """The ring then holds later waves than those that the layer begins with."""
    long = trace_of(1, [60], seed=3)
    right = wanted(long, scan=True)
    with Served(sources[0]) as served:
        paged(sources, served)
        assert equal(served.run(long[:1], scan=True), right[:1])
        here = served.runtime._layers[3]
        whole_kernels = here.kernels
        here.kernels = replace(whole_kernels, module=Breaks(whole_kernels.module, "gate_up_large", n))
        with pytest.raises(RuntimeError, match="launch failed"):
            served.run(long[1:2], scan=True)
        here.kernels = whole_kernels
        assert equal(served.run(long[1:], scan=True), right[1:])


# --- what callers say


@pytest.mark.parametrize("scan", [False, True])
def test_an_id_that_no_expert_has_routes_nowhere(sources, wanted, scan):
    (layer, x, weights, ids), *_ = trace_of(1, [4])
    for strange in (EXPERTS, 1 << 30, -7):
        odd = ids.clone()
        odd[:, 1] = strange
        nowhere = odd.clone()
        nowhere[:, 1] = -1
        right = wanted([(layer, x, weights, nowhere)], scan)
        with Served(sources[0]) as served:
            served.runtime.allocate()
            served.runtime.arm()
            served.runtime._scratch.y.fill_(float("nan"))
            assert equal(served.run([(layer, x, weights, odd)], scan), right)


def test_heat_of_other_layers_is_refused_before_anything_moves(sources):
    heat = {layer: whole.np.ones(EXPERTS, whole.np.uint32) for layer in LAYERS}
    with Served(sources[0]) as served:
        served.runtime.allocate(bytes_of(sources) // 2)
        served.runtime.arm()
        for wrong in ({2: heat[2]}, heat | {3: heat[3][:-1]}):
            with pytest.raises(ConfigError, match="heat of layer 3: expected 12 values"):
                served.runtime.preload(wrong)
        assert served.runtime.counters().misses == 0


# --- the store


def test_a_closed_store_is_said_and_not_read(sources):
    trace = trace_of(1, [2])
    with Served(sources[0]) as served:
        served.runtime.allocate(served.runtime.gpu_bytes_minimum())
        served.runtime.arm()
        served.store.close()
        for scan in (False, True):
            with pytest.raises(StoreError, match="expected an open store"):
                served.run(trace, scan)


def test_requests_of_a_store_have_one_row_of_numbers(sources, wanted):
    """Two runtimes would write over each other's requests; one after the other they count on."""
    trace = trace_of(2, [2, 5])
    right = wanted(trace)
    with Served(sources[0], ram_bytes=bytes_of(sources) // 3, fill=False, limit_s=3.0) as served:
        modules, posted = served.runtime._modules, []
        with pytest.raises(ConfigError, match="no other runtime uses"):
            another(served.store, modules)
        for _ in range(2):
            runtime = served.runtime
            runtime.allocate(runtime.gpu_bytes_minimum())
            runtime.arm()
            assert equal(served.run(trace), right) and runtime.counters().timeouts == 0
            posted.append(runtime.counters().arena_misses)
            runtime.close()
            with pytest.raises(ConfigError, match="found it closed"):
                served.run(trace)
            served.runtime = another(served.store, modules)
        assert ctypes.c_uint32.from_address(served.store.mailbox).value == sum(posted) > posted[0] > 0
    with Served(sources[0]) as served:   # without a mailbox nobody posts
        another(served.store, served.runtime._modules)


def another(store, modules) -> device.DeviceRuntime:
    return device.DeviceRuntime(
        store, activation=whole.ACTIVATION, top_k=TOP_K, device=torch.device("cpu"), max_tokens=64, decode_tokens=8, ring_rows=2, fetch_blocks=2, limit_s=3.0,
        modules=modules,
    )  # fmt: skip


# --- failures


def test_a_row_that_no_token_of_a_scan_wants_fails_nobody(sources, wanted):
    """A large scan streams all absent rows before it knows which ones it needs: one that cannot be read must not end requests that do not ask for it."""
    g = torch.Generator().manual_seed(5)
    trace = []
    for layer, x, weights, _ in trace_of(1, [60], seed=5):
        ids = torch.stack([torch.randperm(EXPERTS - 1, generator=g)[:TOP_K] for _ in range(60)]).int()
        trace.append((layer, x, weights, ids + (ids >= 7)))   # expert 7 is nobody's
    right = wanted(trace, scan=True)
    with Served(sources[0], ram_bytes=bytes_of(sources) // 3, fill=False) as served:
        paged(sources, served)
        for layer in LAYERS:
            served.store.inject(layer, 7, 0, 5, 1 << 30)   # every pread: EIO
        assert equal(served.run(trace, scan=True), right)
        assert served.store.counters().io_errors == len(LAYERS)
        assert served.runtime.counters().failed_rows == 0 and served.store.failure_words.counts() == (0,)
        odd = [(layer, x, weights, torch.where(ids == 3, 7, ids)) for layer, x, weights, ids in trace]
        for n, step in enumerate(odd, 1):
            out = served.run([step], scan=True)[0]
            assert torch.isfinite(out).all() and served.store.failure_words.counts() == (n,)
        assert served.runtime.counters().failed_rows == len(LAYERS)
        served.store.inject(2, 7, 0, 5, 0)
        assert equal(served.run(odd[:1], scan=True), wanted(odd[:1], scan=True))
        assert served.runtime.counters().failed_rows == len(LAYERS)


def test_preload_moves_rows_whether_armed_or_not(sources):
    heat = {layer: whole.np.arange(EXPERTS, dtype=whole.np.uint32) for layer in LAYERS}
    for armed in (False, True):
        with Served(sources[0]) as served:
            runtime = served.runtime
            runtime.allocate(bytes_of(sources) // 2)
            runtime.arm(armed)
            moved = runtime.preload(heat)
            assert moved == sum(int((a.row_of[: s.slots] >= 0).sum()) for a, s in zip(runtime.tables._arrays, runtime.slots, strict=True)) > 0
            (layer, x, weights, ids), *_ = trace_of(1, [2])
            assert bool(served.run([(layer, x, weights, ids)])[0].any()) == armed   # as before
