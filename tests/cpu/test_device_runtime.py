"""DeviceRuntime whole, without a GPU: its kernels run in the emulator, its rows come from files through the host store's own threads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moet.errors import ConfigError
from moet.kernels.expert_mlp import reference
from moet.kernels.expert_mlp.cuda import SOURCES
from moet.layout import RowGeometry, pack_row
from moet.models import Activation
from moet.moe.device import PAGER_SOURCES, DeviceRuntime, allowed_wait
from moet.moe.slots import ClassNeeds, minimum_bytes, split
from moet.store import HostStore, RowSource
from tests.cpu.emulator.build import EmulatedModule
from tests.cpu.layout_cases import random_expert

HIDDEN, INTER, EXPERTS, TOP_K = 64, 64, 12, 3
LAYERS = (2, 3, 5)
ACTIVATION = Activation()


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> tuple[dict[int, RowSource], dict[int, np.ndarray]]:
    """Three layers in files; 5 has rows of another format, so of another size."""
    folder: Path = tmp_path_factory.mktemp("rows")
    found, rows = {}, {}
    for layer in LAYERS:
        g = RowGeometry("mxfp4" if layer == 5 else "tcq2", HIDDEN, INTER, False)
        rows[layer] = np.zeros((EXPERTS, g.row_bytes), np.uint8)
        for e in range(EXPERTS):
            expert = random_expert(g, 100 * layer + e)
            pack_row(g, expert.gate, expert.up, expert.down, rows[layer][e])
        rows[layer].tofile(folder / f"rows-{layer}")
        found[layer] = RowSource(g, EXPERTS, folder / f"rows-{layer}")
    return found, rows


class Served:
    """A store and a runtime over it."""

    def __init__(self, sources: dict[int, RowSource], *, ram_bytes: int = 0, seed: int = 0, decode_tokens: int = 8, ring_rows: int = 2, limit_s: float = 20.0, fill: bool = True) -> None:
        self.store = HostStore(sources, ram_bytes=ram_bytes, io_threads=2, direct_io=False)
        if fill:
            self.store.fill()
        modules = {s.geometry.format_index: EmulatedModule(SOURCES, {"FORMAT": s.geometry.format_index}, seed=seed) for s in sources.values()}
        modules[-1] = EmulatedModule(PAGER_SOURCES, {}, seed=seed)
        self.runtime = DeviceRuntime(
            self.store, activation=ACTIVATION, top_k=TOP_K, device=torch.device("cpu"), max_tokens=64, decode_tokens=decode_tokens, ring_rows=ring_rows,
            fetch_blocks=2, limit_s=limit_s, modules=modules,
        )  # fmt: skip

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()
        self.store.close()

    def run(self, trace: list[tuple], scan: bool = False) -> list[torch.Tensor]:
        return [self.runtime.forward(layer, x, weights, ids, None, scan) for layer, x, weights, ids in trace]


def trace_of(steps: int, tokens: list[int], seed: int = 0) -> list[tuple]:
    """(layer, x, weights, ids) of `steps` steps through all layers."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for step in range(steps):
        n = tokens[step % len(tokens)]
        for layer in LAYERS:
            x = torch.randn(n, HIDDEN, generator=g).bfloat16()
            ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(n)]).int()
            out.append((layer, x, torch.rand(n, TOP_K, generator=g), ids))
    return out


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


def test_the_whole_is_the_reference(sources):
    trace = trace_of(2, [1, 5])
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        for (layer, x, weights, ids), out in zip(trace, served.run(trace), strict=True):
            wanted, bound = np.zeros(out.shape), np.zeros(out.shape)
            for e in ids.unique().tolist():
                share = ((ids == e) * weights).sum(1, keepdim=True).double().numpy()
                answer, size = (
                    reference.expert_mlp(sources[0][layer].geometry, sources[1][layer][e], x.float().numpy(), ACTIVATION, magnitude=m) for m in (False, True)
                )
                wanted += share * answer
                bound += share * (2.0**-8 * np.abs(answer) + 2.0**-8 * size)
            assert (np.abs(out.double().numpy() - wanted) <= bound + 2.0**-8 * np.abs(wanted)).all()


@pytest.mark.parametrize("ram", [0.0, 0.4])
@pytest.mark.parametrize("seed", [0, 7])
def test_coverage_changes_no_bit(sources, ram, seed):
    trace = trace_of(6, [1, 4, 7, 2])
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        wanted = served.run(trace)
        assert served.runtime.counters().misses == len({(layer, int(e)) for layer, _, _, ids in trace for e in ids.unique()})
    total = sum(s.experts * s.geometry.row_bytes for s in sources[0].values())
    with Served(sources[0], ram_bytes=int(ram * total), seed=seed) as served:
        least = served.runtime.gpu_bytes_minimum()
        served.runtime.allocate(0, least)
        served.runtime.arm()
        for share in (1.0, 0.5, 0.0):
            served.runtime.resize(0 if share == 1 else least + int(share * (total - least)))
            for _ in range(2):   # cold, then with what is there
                assert equal(served.run(trace), wanted), share
        counters = served.runtime.counters()
        assert counters.fetched_rows > 0
        assert (counters.arena_misses > 0) == (ram > 0)
        assert counters.waves > 0   # the smallest coverage takes several a layer


@pytest.mark.parametrize("ram", [0.0, 0.4])
def test_scans_change_neither_bits_nor_slots(sources, ram):
    trace, long = trace_of(3, [1, 3]), trace_of(2, [20, 60], seed=3)
    total = sum(s.experts * s.geometry.row_bytes for s in sources[0].values())
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        wanted, wanted_long = served.run(trace), served.run(long, scan=True)
    with Served(sources[0], ram_bytes=int(ram * total)) as served:
        runtime = served.runtime
        runtime.allocate(runtime.gpu_bytes_minimum() + total // 4)
        runtime.arm()
        assert equal(served.run(trace), wanted)
        before = [(a.slot_of.clone(), a.heat.clone(), a.stamp.clone()) for a in runtime.tables._arrays]
        assert equal(served.run(long, scan=True), wanted_long)
        assert equal(served.run(long[3:4], scan=True), wanted_long[3:4])   # a layer alone, after one that the ring was filled for
        for a, (slot_of, heat, stamp) in zip(runtime.tables._arrays, before, strict=True):
            assert torch.equal(a.slot_of, slot_of) and torch.equal(a.heat, heat) and torch.equal(a.stamp, stamp)
        assert runtime.counters().scan_misses > 0
        assert equal(served.run(trace), wanted)


def test_preload_fills_the_working_set_with_the_hottest(sources):
    heat = {layer: np.zeros(EXPERTS, np.uint32) for layer in LAYERS}
    heat[2][[3, 4]], heat[3][[1, 11]], heat[5][[0, 7, 8]] = (90, 80), (70, 100), (3, 2, 1)
    total = sum(s.experts * s.geometry.row_bytes for s in sources[0].values())
    with Served(sources[0]) as served:
        served.runtime.allocate(total // 2)
        served.runtime.arm()
        assert served.runtime.preload(heat) == sum(s.slots - s.staging for s in served.runtime.slots)
        assert {layer: h.tolist() for layer, h in served.runtime.heat().items()} == {layer: h.tolist() for layer, h in heat.items()}
        for layer, experts in ((2, [3, 4]), (3, [1, 11]), (5, [0, 7])):
            ids = torch.full((1, TOP_K), -1, dtype=torch.int32)
            ids[0, : len(experts)] = torch.tensor(experts)
            served.runtime.forward(layer, torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.ones(1, TOP_K), ids)
        assert served.runtime.counters().misses == 0
        assert served.runtime.counters().hits == 6


def test_rows_that_are_no_tokens_ask_for_nothing(sources):
    with Served(sources[0]) as served:
        served.runtime.allocate(served.runtime.gpu_bytes_minimum())
        (layer, x, weights, ids), *_ = trace_of(1, [4])
        assert not served.runtime.forward(layer, x, weights, ids).any()   # not armed
        assert served.runtime.counters().misses == 0
        served.runtime.arm()
        kv_slots = torch.tensor([-1, 3, -1, 9])
        out = served.runtime.forward(layer, x, weights, ids, kv_slots)
        assert not out[[0, 2]].any()
        asked = served.runtime.counters().misses
        assert asked == len(ids[[1, 3]].unique())
        scanned = served.runtime.forward(layer, x, weights, ids, kv_slots, scan=True)
        assert torch.equal(out, scanned)   # few pairs an expert: the same kernels


def test_a_row_that_cannot_be_read_counts_once_and_the_next_step_is_right(sources):
    (layer, x, weights, ids), *_ = trace_of(1, [2])
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        wanted = served.run([(layer, x, weights, ids)])
    total = sum(s.experts * s.geometry.row_bytes for s in sources[0].values())
    for scan in (False, True):
        with Served(sources[0], ram_bytes=total // 3, fill=False) as served:
            served.runtime.allocate(served.runtime.gpu_bytes_minimum())
            served.runtime.arm()
            served.store.inject(layer, int(ids[0, 0]), 0, 5, 1)   # the next pread: EIO
            out = served.run([(layer, x, weights, ids)], scan)
            assert torch.isfinite(out[0]).all() and not torch.equal(out[0], wanted[0])
            assert served.runtime.counters().failed_rows == 1
            assert served.store.failure_text()
            assert equal(served.run([(layer, x, weights, ids)], scan), wanted)
            assert served.runtime.counters().failed_rows == 1


def test_wrong_arguments_are_refused(sources):
    (layer, x, weights, ids), *_ = trace_of(1, [2])
    with Served(sources[0]) as served:
        with pytest.raises(ConfigError, match=r"allocate\(\) before"):
            served.runtime.forward(layer, x, weights, ids)
        with pytest.raises(ConfigError, match="expected at least"):
            served.runtime.allocate(4096)
        served.runtime.allocate()
        with pytest.raises(ConfigError, match="topk_ids"):
            served.runtime.forward(layer, x, weights, ids.long())
        with pytest.raises(ConfigError, match="at most"):
            served.runtime.forward(layer, x.repeat(8, 1), weights.repeat(8, 1), ids.repeat(8, 1))


def test_budgets():
    needs = [ClassNeeds(1 << 20, 512, 64, 48, 64), ClassNeeds(4 << 20, 64, 64, 8, 8)]
    everything = sum(n.slot_bytes * n.rows for n in needs)
    least = minimum_bytes(needs)
    for budget in [least, least + 1, everything // 10, everything // 2, everything - 1]:
        slots = split(needs, budget, 32)
        assert sum(n.slot_bytes * s.total for n, s in zip(needs, slots, strict=True)) <= budget
        for n, s in zip(needs, slots, strict=True):
            assert (s.slots == n.rows and s.staging == s.ring == 0) or (0 < s.staging < s.slots < n.rows and s.ring > 0)
            assert s.waves(n.decode_rows) <= 64
    assert [s.slots for s in split(needs, 0, 32)] == [512, 64]
    with pytest.raises(ConfigError, match=str(least)):
        split(needs, least - 1, 32)


def test_a_kernel_does_not_wait_longer_than_a_watchdog_lets_it():
    assert allowed_wait(30.0, watchdog=False) == 30.0
    assert allowed_wait(30.0, watchdog=True) == 1.0
    assert allowed_wait(0.5, watchdog=True) == 0.5
