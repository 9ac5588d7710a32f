"""The block-scaled GEMMs (kernels/expert_mlp/scaled.cuh), their own source run by the emulator: each kernel against float64 on the activations that it was given, which
only rounds float32 sums; and all of them against the float64 reference that rounds nothing, which is MXFP8's own error."""

import ctypes

import numpy as np
import pytest

from moet.kernels.expert_mlp import reference, reference_mxfp8
from moet.kernels.expert_mlp.cuda import MlpArgs, mlp_args
from moet.kernels.expert_mlp.reference_mxfp8 import column_order, dequantize, quantize
from moet.kernels.expert_mlp.scaled import (
    QUANTIZE_THREADS,
    SCALED_FORMATS,
    SCALED_SOURCES,
    SCALED_THREADS,
    ScaledArgs,
    mxfp8,
    mxfp8_bytes,
    mxfp8_stride,
)
from moet.kernels.paging.state import Control, LayerArgs, Plan, SlotClass
from moet.layout import RowGeometry, pack_row
from moet.models import Activation
from moet.numerics import narrow_bf16, widen_bf16
from tests.cpu.emulator.build import EmulatedModule
from tests.cpu.layout_cases import random_expert
from tests.cpu.scaled_probes import SOURCE, check_block_scaled, check_pack_e4m3

SUMS = 2.0**-20   # relative to the sum of magnitudes: float32 sums of up to a few hundred parts
BF16 = 2.0**-8   # relative error of one rounding to bf16


class Layer:
    """A layer whose rows are all in slots, in a permuted order; scratch is NaN before each run."""

    def __init__(self, geometry: RowGeometry, activation: Activation = Activation(), experts: int = 4, seed: int = 0, rank: int = 0, world: int = 1) -> None:
        self.geometry, self.activation, self.experts, self.rank, self.world = geometry, activation, experts, rank, world
        self.part = geometry.slice(rank, world)
        self.rows = [np.zeros(geometry.row_bytes, np.uint8) for _ in range(experts)]
        for e, row in enumerate(self.rows):
            expert = random_expert(geometry, 100 * seed + e)
            pack_row(geometry, expert.gate, expert.up, expert.down, row)
        self.starts = np.cumsum([0, self.part.segments[0][1], self.part.segments[1][1]])
        self.place(np.random.default_rng(seed).permutation(experts))
        self.control = Control(armed=1)
        self.module = EmulatedModule(SCALED_SOURCES, {"FORMAT": geometry.format_index})

    def place(self, slots: np.ndarray) -> None:
        """Expert e's row goes into slot slots[e]."""
        self.slots, size = slots, -(-self.part.nbytes // 4096) * 4096
        self.pool = np.zeros((self.experts, size), np.uint8)
        for e, row in enumerate(self.rows):
            for start, (offset, length) in zip(self.starts, self.part.segments, strict=True):
                self.pool[slots[e], start : start + length] = row[offset : offset + length]
        self.cls = SlotClass(rows=self.experts, slots=self.experts, slot_bytes=size, pool=self.pool.ctypes.data)

    def plan(self, ids: np.ndarray) -> tuple[Plan, np.ndarray]:
        flat = ids.ravel()
        pairs = np.concatenate([np.flatnonzero(flat == e) for e in range(self.experts)]).astype(np.int32)
        plan, at = Plan(pairs=pairs.ctypes.data, waves=1), 0
        for e in np.unique(flat[flat >= 0]):
            step, count = plan.steps[plan.count], int((flat == e).sum())
            step.expert = step.row = int(e)
            step.slot, step.hit, step.pair_begin, step.pair_count = int(self.slots[e]), 1, at, count
            at, plan.count = at + count, plan.count + 1
        for w in range(1, len(plan.wave_begin)):
            plan.wave_begin[w] = plan.count
        return plan, pairs

    def run(self, x: np.ndarray, ids: np.ndarray, blocks: int = 3) -> "Run":
        """x: bf16 bits, uint16 [tokens, hidden]; ids [tokens, top_k]."""
        (tokens, top_k), g = ids.shape, self.geometry
        plan, pairs = self.plan(ids)
        mlp = mlp_args(g, self.part, tuple(int(s) for s in self.starts), self.activation, self.rank)
        y = np.full((tokens * top_k, g.hidden), 0x7FC1, np.uint16)
        buffers = [np.full(mxfp8_bytes(rows, columns) + 16, 0xFF, np.uint8) for rows, columns in ((tokens, g.hidden), (tokens * top_k, 32 * mlp.tiles))]
        mlp.layer = LayerArgs(
            slots=ctypes.addressof(self.cls), control=ctypes.addressof(self.control), plan=ctypes.addressof(plan), topk_ids=ids.ctypes.data,
            tokens=tokens, top_k=top_k, experts=self.experts,
        )  # fmt: skip
        mlp.x, mlp.y = x.ctypes.data, y.ctypes.data
        at = [-(-b.ctypes.data // 16) * 16 for b in buffers]
        args = ScaledArgs(MlpArgs.from_buffer_copy(mlp), mxfp8(at[0], tokens, g.hidden), mxfp8(at[1], tokens * top_k, 32 * mlp.tiles))
        self.module.launch("quantize_x", blocks, QUANTIZE_THREADS, args)
        self.module.launch("gate_up_scaled", blocks, SCALED_THREADS, args)
        self.module.launch("down_scaled", blocks, SCALED_THREADS, args)
        assert all((b[-(16 - (start - b.ctypes.data)) :] == 0xFF).all() for b, start in zip(buffers, at, strict=True))
        stored = [b[start - b.ctypes.data :] for b, start in zip(buffers, at, strict=True)]
        return Run(self, x, ids, pairs, self.unpack(stored[0], tokens, g.hidden), self.unpack(stored[1], tokens * top_k, 32 * mlp.tiles), y)

    def unpack(self, stored: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes [rows, columns] in the columns' order, and scales without what they take back of the weights'."""
        stride = mxfp8_stride(columns)
        codes = np.empty((rows, stride // 32, 32), np.uint8)
        codes[..., column_order(self.geometry.bits)] = stored[: rows * stride].reshape(rows, -1, 32)
        scales = stored[rows * stride : rows * stride // 32 * 33].reshape(rows, -1)[:, : -(-columns // 32)]
        return codes.reshape(rows, -1)[:, :columns], np.where(scales == 255, 255, scales - (6 if self.geometry.format == "mxfp4" else 0))


class Run:
    """What the three kernels made, and what float64 says of each."""

    def __init__(self, layer: Layer, x: np.ndarray, ids: np.ndarray, pairs: np.ndarray, x8: tuple, act8: tuple, y: np.ndarray) -> None:
        self.layer, self.ids, self.pairs = layer, ids, pairs
        self.x, self.x8, self.act8, self.y = widen_bf16(x), x8, act8, widen_bf16(y)
        self.bits = y.tobytes()

    def check(self) -> None:
        codes, scales = quantize(self.x)
        assert (self.x8[0] == codes).all() and (self.x8[1] == scales).all()
        layer, top_k, flat = self.layer, self.ids.shape[1], self.ids.ravel()
        columns = slice(32 * layer.part.tile_begin, min(32 * layer.part.tile_end, layer.geometry.inter))
        x = np.pad(dequantize(codes, scales), ((0, 0), (0, layer.geometry.hidden_padded - layer.geometry.hidden)))
        for e in np.unique(flat[flat >= 0]):
            gate, up, down, gate_bias, up_bias, down_bias = reference.decode_row(layer.geometry, layer.rows[e])
            at = np.flatnonzero(flat[self.pairs] == e)
            of = x[self.pairs[at] // top_k]
            gates, ups = (of @ m[columns].T + b[columns] for m, b in ((gate, gate_bias), (up, up_bias)))
            slack = sum((np.abs(of) @ np.abs(m[columns]).T + np.abs(b[columns])) * 2 * (np.abs(v) + 1) for m, b, v in ((gate, gate_bias, ups), (up, up_bias, gates)))
            self.check_middle(at, reference.activate(layer.activation, gates, ups), SUMS * slack + 1e-37)
            middle = dequantize(self.act8[0][at], self.act8[1][at])[:, : columns.stop - columns.start]
            bias = down_bias if layer.rank == 0 else np.zeros_like(down_bias)
            expected, size = (middle @ down[:, columns].T + bias)[:, : layer.geometry.hidden], np.abs(middle) @ np.abs(down[:, columns]).T + np.abs(bias)
            error = np.abs(self.y[self.pairs[at]] - expected)
            assert (error <= BF16 * np.abs(expected) + 2 * SUMS * size[:, : layer.geometry.hidden] + 1e-37).all()

    def check_middle(self, at: np.ndarray, expected: np.ndarray, slack: np.ndarray) -> None:
        """The scale is one that a value within `slack` has, and so is each code; padding is zero."""
        (codes, scales), found = (part[at] for part in self.act8), dequantize(self.act8[0][at], self.act8[1][at])
        pad = codes.shape[1] - expected.shape[1]
        assert not (codes[:, expected.shape[1] :] & 0x7F).any()
        expected, slack = (np.pad(v, ((0, 0), (0, pad))) for v in (expected, slack))
        low, high = (np.abs(expected) - slack).clip(0), np.abs(expected) + slack
        for block in range(scales.shape[1]):
            here = slice(32 * block, 32 * block + 32)
            least, most = (quantize(np.broadcast_to(v[:, here].max(-1)[:, None], (len(at), 32)))[1][:, 0] for v in (low, high))
            assert ((least <= scales[:, block]) & (scales[:, block] <= most)).all()
        step = 2.0 ** (scales.astype(np.float64) - 127)
        ulp = np.maximum(2.0**-9, 2.0 ** (np.floor(np.log2(np.maximum(high / np.repeat(step, 32, axis=1), 1e-30))) - 3)) * np.repeat(step, 32, axis=1)
        assert (np.abs(found - expected) <= slack + ulp / 2).all()

    def answers(self) -> np.ndarray:
        """float64 [pairs, hidden]: what exact activations give."""
        layer, flat = self.layer, self.ids.ravel()
        out = np.zeros((len(flat), layer.geometry.hidden))
        for e in np.unique(flat[flat >= 0]):
            at = np.flatnonzero(flat == e)
            out[at] = reference.expert_mlp(layer.geometry, layer.rows[e], self.x[at // self.ids.shape[1]], layer.activation, rank=layer.rank, world=layer.world)
        return out


def batch(seed: int, tokens: int, hidden: int, top_k: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits with outlier channels, as hidden states have them, and distinct experts of each token."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    x[:, rng.integers(0, hidden, max(1, hidden // 50))] *= 20
    return narrow_bf16(x), np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)


def run_probe(kernel, args, arrays, n):
    EmulatedModule([SOURCE]).launch(kernel, 1, 32, args(*[a.ctypes.data for a in arrays], *([n] if n else [])))
    return arrays


@pytest.mark.parametrize("seed", range(3))
def test_the_instruction(seed):
    check_block_scaled(run_probe, seed)


def test_rounding_to_e4m3():
    check_pack_e4m3(run_probe)


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_formats(format):
    layer = Layer(RowGeometry(format, 160, 96, False), experts=5, seed=2)
    x, ids = batch(1, 11, 160, 3, 5)
    ids[4, 1] = -1
    layer.run(x, ids).check()
