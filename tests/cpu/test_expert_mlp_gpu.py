"""The GPU's expert MLP, its own source run by the emulator, against the float64 reference: every row format, both sizes of kernels, routings of all kinds."""

import ctypes

import numpy as np
import pytest
import torch

from moet.errors import ConfigError
from moet.kernels.expert_mlp.cuda import SOURCES, MlpArgs, Planes, act_stride, mlp_args, padded
from moet.kernels.expert_mlp.launches import PAIRS, ExpertKernels, SmallKernel
from moet.kernels.paging.state import Control, LayerArgs, Plan, SlotClass
from moet.layout import FORMATS, RowGeometry, pack_row
from moet.models import Activation
from moet.moe.device import PAGER_SOURCES
from tests.cpu.emulator.build import EmulatedModule
from tests.cpu.layout_cases import random_expert
from tests.gpu import dequantized


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def row_of(geometry: RowGeometry, seed: int) -> np.ndarray:
    row, expert = np.zeros(geometry.row_bytes, np.uint8), random_expert(geometry, seed)
    pack_row(geometry, expert.gate, expert.up, expert.down, row)
    return row


class Bench:
    """One layer with all rows in slots, in a permuted order, and scratch that is NaN."""

    def __init__(self, geometry: RowGeometry, activation: Activation, experts: int, seed: int, rank: int = 0, world: int = 1, arch: int = 90) -> None:
        rng = np.random.default_rng(seed)
        self.geometry, self.activation, self.experts, self.rank, self.world = geometry, activation, experts, rank, world
        self.rows = [row_of(geometry, 100 * seed + e) for e in range(experts)]
        part = geometry.slice(rank, world)
        size = -(-part.nbytes // 4096) * 4096
        self.pool = np.zeros((experts, size), np.uint8)
        self.slots = rng.permutation(experts)
        starts = np.cumsum([0, part.segments[0][1], part.segments[1][1]])
        for e, row in enumerate(self.rows):
            for start, (offset, length) in zip(starts, part.segments, strict=True):
                self.pool[self.slots[e], start : start + length] = row[offset : offset + length]
        self.args = mlp_args(geometry, part, tuple(int(s) for s in starts), activation, rank)
        self.cls = SlotClass(rows=experts, slots=experts, slot_bytes=size, pool=self.pool.ctypes.data)
        self.control = Control(armed=1)
        self.module, self.pager = EmulatedModule(SOURCES, {"FORMAT": geometry.format_index, "MOET_ARCH": arch}), EmulatedModule(PAGER_SOURCES)
        self.arch = arch

    def plan(self, ids: np.ndarray) -> Plan:
        flat = ids.ravel()
        self.pairs = np.concatenate([np.flatnonzero(flat == e) for e in range(self.experts)]).astype(np.int32)
        plan, at = Plan(pairs=self.pairs.ctypes.data, waves=int((flat >= 0).any())), 0
        for e in np.unique(flat[flat >= 0]):
            count = int((flat == e).sum())
            step = plan.steps[plan.count]
            step.expert = step.row = int(e)
            step.slot, step.hit, step.pair_begin, step.pair_count = int(self.slots[e]), 1, at, count
            at += count
            plan.count += 1
        for w in range(1, len(plan.wave_begin)):
            plan.wave_begin[w] = plan.count
        return plan

    def run(self, x: np.ndarray, weights: np.ndarray, ids: np.ndarray, size: str, blocks: int = 3, kv_slots: np.ndarray | None = None, combines: bool = True) -> np.ndarray:
        """uint16 (bf16) [tokens, hidden]; x is uint16."""
        tokens, top_k = ids.shape
        plan = self.plan(ids if kv_slots is None else np.where(kv_slots[:, None] < 0, -1, ids))
        args = MlpArgs.from_buffer_copy(self.args)
        act = np.full((tokens * top_k, act_stride(args.tiles)), 0x7FC1, np.uint16)
        y = np.full((tokens * top_k, self.geometry.hidden), 0x7FC1, np.uint16)
        out = np.full((tokens, self.geometry.hidden), 0x7FC1, np.uint16)
        args.layer = LayerArgs(
            slots=ctypes.addressof(self.cls), control=ctypes.addressof(self.control), plan=ctypes.addressof(plan), topk_ids=ids.ctypes.data,
            kv_slots=0 if kv_slots is None else kv_slots.ctypes.data, tokens=tokens, top_k=top_k, experts=self.experts,
        )  # fmt: skip
        args.x, args.act, args.y, args.weights, args.out = (a.ctypes.data for a in (x, act, y, weights, out))
        x_codes, x_large = (np.full((tokens, 2 * padded(self.geometry.hidden)), 0xFF, np.uint8) for _ in range(2))
        args.x_large = x_large.ctypes.data
        x_exponents = np.full((tokens, padded(self.geometry.hidden) // 32 * 4), 0xFF, np.uint8)
        act_exponents = np.full((tokens * top_k, act_stride(args.tiles) // 32 * 4), 0xFF, np.uint8)
        x_broken, act_broken = np.full(tokens, 0xFFFFFFFF, np.uint32), np.full(tokens * top_k, 0xFFFFFFFF, np.uint32)
        args.x_planes = Planes(x_codes.ctypes.data, x_exponents.ctypes.data, x_broken.ctypes.data)
        args.act_planes = Planes(act.ctypes.data, act_exponents.ctypes.data, act_broken.ctypes.data)
        kernels = ExpertKernels(self.geometry.format, self.module, self.pager, self.arch, blocks)
        kernels.quantize(args, size, 0)
        args.combines = combines and size == "small"
        kernels.gemms(args, size, 1, 0)
        if not args.combines:
            kernels.combine(args, 0)
        return out

    def check(self, x: np.ndarray, weights: np.ndarray, ids: np.ndarray, out: np.ndarray, size: str, rows: np.ndarray | None = None) -> None:
        """Within what the roundings of the size's kernels allow. rows: only these."""
        rows = np.arange(len(x)) if rows is None else rows
        values = torch.from_numpy(from_bf16(x)[rows])
        experts = {e: dequantized.decode(self.geometry, torch.from_numpy(row)).part(self.geometry, self.rank, self.world) for e, row in enumerate(self.rows)}
        expected = dequantized.layer(experts, values, torch.from_numpy(weights[rows]), torch.from_numpy(ids[rows]), self.activation, PAIRS[size])
        dequantized.check(torch.from_numpy(from_bf16(out)[rows]), expected, (self.geometry, size))


def routing(rng: np.random.Generator, tokens: int, top_k: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    return rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32), ids


CASES = [(f, size) for f in FORMATS for size in PAIRS]


@pytest.mark.parametrize(("format", "size"), CASES)
def test_formats(format, size):
    rng = np.random.default_rng(1)
    bench = Bench(RowGeometry(format, 160, 96, False), Activation(), 5, 2)
    x = to_bf16(rng.standard_normal((11, 160)))
    weights, ids = routing(rng, 11, 3, 5)
    ids[4, 1] = -1
    ids[:, 2] = 3   # MANY pairs, and others have fewer
    bench.check(x, weights, ids, bench.run(x, weights, ids, size), size)


def test_tcq2_without_a_table():
    """GPUs with 100 KiB of shared memory decode with byte permutes; the bits are the same."""
    rng = np.random.default_rng(14)
    x, (weights, ids) = to_bf16(rng.standard_normal((9, 160))), routing(rng, 9, 2, 4)
    found = [Bench(RowGeometry("tcq2", 160, 96, False), Activation(), 4, 15, arch=arch).run(x, weights, ids, "small") for arch in (90, 120, 86, 80)]
    assert (found[0] == found[1]).all()


def test_places_are_added_up_in_the_launch_or_in_one_of_their_own():
    rng = np.random.default_rng(16)
    for format in FORMATS:
        bench = Bench(RowGeometry(format, 192, 96, False), Activation(), 3, 17)
        x, (weights, ids) = to_bf16(rng.standard_normal((21, 192))), routing(rng, 21, 2, 3)
        found = [bench.run(x, weights, ids, "small", combines=combines) for combines in (True, False)]
        assert all((f == found[0]).all() for f in found[1:]), format


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("activation", [Activation(limit=1.5), Activation("swiglu_oai", 7.0)])
def test_activations_biases_and_odd_sizes(size, activation):
    rng = np.random.default_rng(3)
    bench = Bench(RowGeometry("mxfp4", 96, 160, True), activation, 3, 4)   # hidden is no multiple of 64, 5 tiles
    x = to_bf16(rng.standard_normal((5, 96)))
    weights, ids = routing(rng, 5, 2, 3)
    bench.check(x, weights, ids, bench.run(x, weights, ids, size), size)
    odd = Bench(RowGeometry("tcq2", 72, 40, False), activation, 3, 5)   # nor is inter one of 32
    x = to_bf16(rng.standard_normal((5, 72)))
    odd.check(x, weights, ids, odd.run(x, weights, ids, size), size)


def test_ranks_add_up_to_the_whole():
    rng = np.random.default_rng(6)
    x, (weights, ids) = to_bf16(rng.standard_normal((3, 64))), routing(rng, 3, 2, 3)
    for rank in range(2):
        part = Bench(RowGeometry("tcq2", 64, 160, True), Activation(), 3, 7, rank, 2)
        part.check(x, weights, ids, part.run(x, weights, ids, "small"), "small")


def test_one_expert_for_all_and_many_tokens():
    rng = np.random.default_rng(8)
    bench = Bench(RowGeometry("sym2", 64, 64, False), Activation(), 4, 9)
    x = to_bf16(rng.standard_normal((150, 64)))
    weights = rng.uniform(0.1, 1, (150, 1)).astype(np.float32)
    ids = np.full((150, 1), 2, np.int32)
    for size in ("small", "large"):
        bench.check(x, weights, ids, bench.run(x, weights, ids, size), size)


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_row_does_not_depend_on_its_batch(size):
    rng = np.random.default_rng(10)
    bench = Bench(RowGeometry("tcq2", 128, 64, False), Activation(), 4, 11)
    x, (weights, ids) = to_bf16(rng.standard_normal((20, 128))), routing(rng, 20, 2, 4)
    together = bench.run(x, weights, ids, size)
    assert (together == bench.run(x, weights, ids, size, blocks=7)).all()
    for t in (0, 7, 19):
        alone = bench.run(x[t : t + 1].copy(), weights[t : t + 1].copy(), ids[t : t + 1].copy(), size)
        assert (alone[0] == together[t]).all()
    order = rng.permutation(4)   # the same rows in other slots
    bench.pool, bench.slots = bench.pool[order].copy(), np.argsort(order)[bench.slots]
    bench.cls.pool = bench.pool.ctypes.data
    assert (together == bench.run(x, weights, ids, size)).all()


def test_rows_that_are_no_tokens_give_zeros():
    rng = np.random.default_rng(12)
    bench = Bench(RowGeometry("tcq2", 64, 32, False), Activation(), 3, 13)
    x, (weights, ids) = to_bf16(rng.standard_normal((4, 64))), routing(rng, 4, 2, 3)
    kv_slots = np.array([5, -1, 0, -1], np.int64)
    out = bench.run(x, weights, ids, "small", kv_slots=kv_slots)
    assert (out[[1, 3]] == 0).all()
    live = bench.run(x[[0, 2]].copy(), weights[[0, 2]].copy(), ids[[0, 2]].copy(), "small")
    assert (out[[0, 2]] == live).all()
    bench.control.armed = 0
    assert (bench.run(x, weights, np.full_like(ids, -1), "small") == 0).all()


@pytest.mark.parametrize(("format", "arch"), [*(("tcq2", arch) for arch in (80, 90, 120)), ("mxfp4", 86), ("mxfp4", 90), ("nvfp4", 90), *((f, arch) for f in ("fp8", "fp8_row", "bf16") for arch in (80, 90, 100, 120))])
def test_shared_memory_is_what_the_kernels_lay_out(format, arch):
    code = '// \nextern "C" int asked() { return kSharedBytes; }'
    module = EmulatedModule([*SOURCES[:1], code], {"FORMAT": list(FORMATS).index(format), "MOET_ARCH": arch})
    assert SmallKernel(format, arch).shared_bytes == module.library.asked()


@pytest.mark.parametrize(("format", "arch"), [*[("tcq2", arch) for arch in (80, 89, 90, 120)], *[(f, arch) for f in ("nvfp4", "fp8", "bf16") for arch in (80, 90)], ("sym2", 90)])
def test_long_sums_on_every_architecture(format, arch):
    """Each warp of a group has several chunks one after the other, the last one in part; columns that are no whole chunk, an odd number of tiles. K is 1056 and 1504.
    With hidden 64 a strip of w2 is one piece, and what lies behind its last block is no block."""
    rng = np.random.default_rng(18)
    weights, ids = routing(rng, 5, 2, 2)
    for hidden, inter in ((1056, 48), (64, 1504)):
        bench = Bench(RowGeometry(format, hidden, inter, True), Activation(limit=7.0), 2, 19, arch=arch)
        x = to_bf16(rng.standard_normal((5, hidden)))
        for size in ("small", "large")[: 2 if arch in (80, 90) else 1]:
            bench.check(x, weights, ids, bench.run(x, weights, ids, size), size)


@pytest.mark.parametrize("format", ["tcq2", "mxfp4", "bf16"])
def test_bits_do_not_depend_on_who_runs_when(format):
    """Blocks and threads interleaved by seed: down items that wait for gate and up's, the last finisher of a strip that combines."""
    rng = np.random.default_rng(20)
    bench = Bench(RowGeometry(format, 192, 96, False), Activation(), 4, 21)
    x, (weights, ids) = to_bf16(rng.standard_normal((9, 192))), routing(rng, 9, 2, 4)
    expected = bench.run(x, weights, ids, "small")
    for seed, blocks in ((1, 1), (2, 2), (3, 5), (4, 16), (5, 3)):
        bench.module.seed = seed
        assert (bench.run(x, weights, ids, "small", blocks=blocks) == expected).all(), (seed, blocks)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("format", ["tcq2", "mxfp4", "nvfp4", "fp8_row", "bf16"])
def test_a_token_that_is_not_finite_spoils_only_itself(format, size):
    """NaN and infinity in a token, in the place beside another token of the same expert; a token of zeros; one whose blocks differ by 2^60."""
    rng = np.random.default_rng(22)
    bench = Bench(RowGeometry(format, 96, 96, False), Activation(), 2, 23)
    x, (weights, ids) = from_bf16(to_bf16(rng.standard_normal((6, 96)))).copy(), routing(rng, 6, 2, 2)
    x[4] = 0
    x[5, :32] *= 2.0**-60
    clean = bench.run(to_bf16(x), weights, ids, size)
    bench.check(to_bf16(x), weights, ids, clean, size)
    x[1, 40], x[3, 95] = np.nan, np.inf
    found = bench.run(to_bf16(x), weights, ids, size)
    assert (found[[0, 2, 4, 5]] == clean[[0, 2, 4, 5]]).all() and not found[4].any()
    assert np.isnan(from_bf16(found[1])).all() and not np.isfinite(from_bf16(found[3])).any()


@pytest.mark.parametrize("size", ["small", "large"])
def test_an_expert_twice_in_a_token_counts_twice(size):
    rng = np.random.default_rng(24)
    bench = Bench(RowGeometry("tcq2", 64, 64, False), Activation(), 3, 25)
    x, weights = to_bf16(rng.standard_normal((4, 64))), rng.uniform(0.1, 1, (4, 3)).astype(np.float32)
    ids = np.array([[1, 1, 2], [0, 0, 0], [2, 1, 2], [-1, 1, 1]], np.int32)
    bench.check(x, weights, ids, bench.run(x, weights, ids, size), size)


@pytest.mark.parametrize("hidden", [60, 32776])
def test_hidden_sizes_that_the_kernels_do_not_take(hidden):
    geometry = RowGeometry("tcq2", hidden, 64, False)
    with pytest.raises(ConfigError, match=f"multiple of 8, at most 32768, on a GPU, found {hidden}"):
        mlp_args(geometry, geometry.slice(0, 1), (0, 0, 0), Activation(), 0)


@pytest.mark.parametrize(("format", "arch"), [("tcq2", 90), ("mxfp4", 120), ("sym2", 80)])
def test_items_that_leave_warps_without_work(format, arch):
    """K of one and of two chunks for four consumers, and dozens of items for each group: those that have nothing to read go on with the others."""
    rng = np.random.default_rng(26)
    for hidden, inter in ((64, 32), (96, 96)):
        bench = Bench(RowGeometry(format, hidden, inter, False), Activation(), 6, 27, arch=arch)
        x, (weights, ids) = to_bf16(rng.standard_normal((31, hidden))), routing(rng, 31, 3, 6)
        for seed, blocks in ((0, 1), (1, 2)):
            bench.module.seed = seed
            bench.check(x, weights, ids, bench.run(x, weights, ids, "small", blocks=blocks), "small")
