"""A layer for the block-scaled GEMMs (kernels/expert_mlp/scaled.cuh), in host memory with the emulator or on a GPU, and what float64 says of each kernel's output: of
the activations that it was given, so that only float32 sums are between the two."""

import ctypes
from collections.abc import Callable

import numpy as np

from moet.kernels.expert_mlp import reference
from moet.kernels.expert_mlp.cuda import MlpArgs, mlp_args
from moet.kernels.expert_mlp.launches import PREPARE_THREADS, SCALED
from moet.kernels.expert_mlp.reference_mxfp8 import column_order, dequantize, quantize
from moet.kernels.expert_mlp.scaled import SCALED_SOURCES, mxfp8_row_bytes
from moet.kernels.gpu.module import Module
from moet.kernels.paging.state import Control, LayerArgs, Plan, SlotClass
from moet.layout import RowGeometry, pack_row
from moet.models import Activation
from moet.numerics import narrow_bf16, widen_bf16
from tests.cpu.layout_cases import random_expert

PLAIN = Activation()
SUMS = 2.0**-20   # relative to the sum of magnitudes: float32 sums of up to a few hundred parts
BF16 = 2.0**-8    # relative error of one rounding to bf16


class Placed:
    """Bytes where kernels see them: a copy of an array or of a struct, 16-byte aligned."""

    def __init__(self, content: np.ndarray | ctypes.Structure, gpu: bool) -> None:
        array = content if isinstance(content, np.ndarray) else np.frombuffer(bytes(content), np.uint8)
        self.dtype, self.shape, self.gpu = array.dtype, array.shape, gpu
        flat = np.frombuffer(array.tobytes(), np.uint8)
        if gpu:
            import torch

            self.memory = torch.from_numpy(flat.copy()).cuda()
            self.address = self.memory.data_ptr()
        else:
            self.memory = np.zeros(len(flat) + 16, np.uint8)
            skip = -self.memory.ctypes.data % 16
            self.memory = self.memory[skip : skip + len(flat)]
            self.memory[:] = flat
            self.address = self.memory.ctypes.data

    def read(self) -> np.ndarray:
        flat = self.memory.cpu().numpy() if self.gpu else self.memory
        return flat.view(self.dtype).reshape(self.shape).copy()


def run_probe(module: Module, gpu: bool) -> Callable:
    """As scaled_probes.Run."""

    def run(kernel: str, args: type, arrays: list[np.ndarray], n: int) -> list[np.ndarray]:
        placed = [Placed(a, gpu) for a in arrays]
        module.launch(kernel, 1, 32, args(*[p.address for p in placed], *([n] if n else [])))
        return [p.read() for p in placed]

    return run


class Layer:
    """Rows are all in slots, in a permuted order; scratch is NaN before each run. make_module(sources, defines): EmulatedModule or CudaModule."""

    def __init__(
        self, make_module: Callable[..., Module], geometry: RowGeometry, activation: Activation = PLAIN, *, experts: int = 4, seed: int = 0, rank: int = 0, world: int = 1,
        gpu: bool = False,
    ) -> None:  # fmt: skip
        self.geometry, self.activation, self.experts, self.rank, self.gpu, self.world = geometry, activation, experts, rank, gpu, world
        self.part = geometry.slice(rank, world)
        self.rows = [np.zeros(geometry.row_bytes, np.uint8) for _ in range(experts)]
        for e, row in enumerate(self.rows):
            expert = random_expert(geometry, 100 * seed + e)
            pack_row(geometry, expert.gate, expert.up, expert.down, row)
        self.starts = np.cumsum([0, self.part.segments[0][1], self.part.segments[1][1]])
        self.fill(np.random.default_rng(seed).permutation(experts))
        self.module = make_module(SCALED_SOURCES, {"FORMAT": geometry.format_index})

    def fill(self, slots: np.ndarray) -> None:
        """Expert e's row goes into slot slots[e]."""
        self.slots, size = slots, -(-self.part.nbytes // 4096) * 4096
        pool = np.zeros((self.experts, size), np.uint8)
        for e, row in enumerate(self.rows):
            for start, (offset, length) in zip(self.starts, self.part.segments, strict=True):
                pool[slots[e], start : start + length] = row[offset : offset + length]
        self.pool = Placed(pool, self.gpu)
        self.cls = Placed(SlotClass(rows=self.experts, slots=self.experts, slot_bytes=size, pool=self.pool.address), self.gpu)

    def plan(self, ids: np.ndarray, failed: int) -> tuple[Plan, np.ndarray]:
        flat = ids.ravel()
        pairs = np.concatenate([np.flatnonzero(flat == e) for e in range(self.experts)]).astype(np.int32)
        plan, at = Plan(waves=1), 0
        for e in np.unique(flat[flat >= 0]):
            step, count = plan.steps[plan.count], int((flat == e).sum())
            step.expert = step.row = int(e)
            step.slot, step.hit, step.pair_begin, step.pair_count, step.reserved = int(self.slots[e]), int(e != failed), at, count, -1
            plan.ready[plan.count] = 0x80000000 if e == failed else 0
            at, plan.count = at + count, plan.count + 1
        for w in range(1, len(plan.wave_begin)):
            plan.wave_begin[w] = plan.count
        return plan, pairs

    def run(self, x: np.ndarray, ids: np.ndarray, blocks: int = 3, failed: int = -1) -> "Run":
        """x: bf16 bits, uint16 [tokens, hidden]; ids [tokens, top_k]; failed: an expert whose row could not be read."""
        (tokens, top_k), g = ids.shape, self.geometry
        plan, pairs = self.plan(ids, failed)
        mlp = MlpArgs.from_buffer_copy(mlp_args(g, self.part, tuple(int(s) for s in self.starts), self.activation, self.rank))
        shapes = (tokens, g.hidden), (tokens * top_k, 32 * mlp.tiles)
        placed = {name: Placed(v, self.gpu) for name, v in {"x": x, "ids": ids.astype(np.int32), "pairs": pairs, "control": Control(armed=1)}.items()}
        plan.pairs = placed["pairs"].address
        placed_plan = Placed(plan, self.gpu)
        y = Placed(np.full((tokens * top_k, g.hidden), 0x7FC1, np.uint16), self.gpu)
        x8, act8 = (Placed(np.full(rows * mxfp8_row_bytes(columns) + 64, 0xFF, np.uint8), self.gpu) for rows, columns in shapes)
        mlp.layer = LayerArgs(
            slots=self.cls.address, control=placed["control"].address, plan=placed_plan.address, topk_ids=placed["ids"].address, tokens=tokens, top_k=top_k, experts=self.experts
        )
        mlp.x, mlp.y, mlp.x_large, mlp.act, mlp.many = placed["x"].address, y.address, x8.address, act8.address, 1
        self.module.launch("quantize_x", blocks, PREPARE_THREADS, mlp)
        self.module.launch("gate_up_scaled", blocks, SCALED.threads, mlp)
        self.module.launch("down_scaled", blocks, SCALED.threads, mlp)
        stored = [x8.read(), act8.read()]
        assert all((s[-64:] == 0xFF).all() for s in stored), "a write behind the buffer"
        return Run(self, x, ids, pairs, *(self.unpack(s, *shape) for s, shape in zip(stored, shapes, strict=True)), y.read())

    def unpack(self, stored: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes [rows, columns] in the columns' order, and scales without what they take back of the weights'."""
        stride = mxfp8_row_bytes(columns) // 33 * 32
        codes = np.empty((rows, stride // 32, 32), np.uint8)
        codes[..., column_order(self.geometry.bits)] = stored[: rows * stride].reshape(rows, -1, 32)
        scales = stored[rows * stride : rows * stride // 32 * 33].reshape(rows, -1)[:, : -(-columns // 32)]
        return codes.reshape(rows, -1)[:, :columns], np.where(scales == 255, 255, scales - (6 if self.geometry.format == "mxfp4" else 0))


class Run:
    """What the three kernels made."""

    def __init__(self, layer: Layer, x: np.ndarray, ids: np.ndarray, pairs: np.ndarray, x8: tuple, act8: tuple, y: np.ndarray) -> None:
        self.layer, self.ids, self.pairs = layer, ids, pairs
        self.x, self.x8, self.act8, self.y = widen_bf16(x), x8, act8, widen_bf16(y)
        self.routed = ids.ravel() >= 0

    def bits(self) -> bytes:
        """Of the answers of pairs, which hold whatever they held where nothing is routed."""
        return self.y[self.routed].tobytes()

    def check(self) -> None:
        """x's codes and scales to the bit; the values between the GEMMs, and the answers from those that were stored, within what float32 sums allow."""
        codes, scales = quantize(self.x)
        assert (self.x8[0] == codes).all() and (self.x8[1] == scales).all()
        layer, top_k, flat = self.layer, self.ids.shape[1], self.ids.ravel()
        hidden, columns = layer.geometry.hidden, slice(32 * layer.part.tile_begin, min(32 * layer.part.tile_end, layer.geometry.inter))
        x = np.pad(dequantize(codes, scales), ((0, 0), (0, layer.geometry.hidden_padded - hidden)))
        for e in np.unique(flat[self.routed]):
            gate, up, down, gate_bias, up_bias, down_bias = reference.decode_row(layer.geometry, layer.rows[e])
            at = np.flatnonzero(flat[self.pairs] == e)
            of = x[self.pairs[at] // top_k]
            gates, ups = (of @ m[columns].T + b[columns] for m, b in ((gate, gate_bias), (up, up_bias)))
            # The activation's slope is below 2 in gate, relative to |up| + 1, and below |gate| in up.
            slack = sum((np.abs(of) @ np.abs(m[columns]).T + np.abs(b[columns])) * 2 * (np.abs(v) + 1) for m, b, v in ((gate, gate_bias, ups), (up, up_bias, gates)))
            self.check_middle(at, reference.activate(layer.activation, gates, ups), SUMS * slack + 1e-37)
            middle, bias = dequantize(self.act8[0][at], self.act8[1][at])[:, : columns.stop - columns.start], down_bias * (layer.rank == 0)
            expected, size = ((a @ d[:, columns].T + b)[:, :hidden] for a, d, b in ((middle, down, bias), (np.abs(middle), np.abs(down), np.abs(bias))))
            assert (np.abs(self.y[self.pairs[at]] - expected) <= BF16 * np.abs(expected) + SUMS * size + 1e-37).all()

    def check_middle(self, at: np.ndarray, expected: np.ndarray, slack: np.ndarray) -> None:
        """A block's scale is that of values within `slack` of the expected ones, and so is each code. Padding is zero."""
        (codes, scales), found = (part[at] for part in self.act8), dequantize(self.act8[0][at], self.act8[1][at])
        assert not (codes[:, expected.shape[1] :] & 0x7F).any()
        expected, slack = (np.pad(v, ((0, 0), (0, codes.shape[1] - v.shape[1]))) for v in (expected, slack))
        low, high = (np.abs(expected) - slack).clip(0), np.abs(expected) + slack
        least, most = (quantize(v)[1] for v in (low, high))
        assert ((least <= scales) & (scales <= most)).all()
        step = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
        ulp = step * np.maximum(2.0**-9, 2.0 ** (np.floor(np.log2(np.maximum(high / step, 2.0**-20))) - 3))
        assert (np.abs(found - expected) <= slack + ulp / 2).all()

    def error(self) -> np.ndarray:
        """Of each routed pair's answer against float64 with exact activations: the distance, relative to the answer's norm."""
        layer, flat = self.layer, self.ids.ravel()
        wanted = np.zeros(self.y.shape)
        for e in np.unique(flat[self.routed]):
            at = np.flatnonzero(flat == e)
            wanted[at] = reference.expert_mlp(layer.geometry, layer.rows[e], self.x[at // self.ids.shape[1]], layer.activation, rank=layer.rank, world=layer.world)
        return (np.linalg.norm(self.y - wanted, axis=1) / np.linalg.norm(wanted, axis=1))[self.routed]


def batch(seed: int, tokens: int, hidden: int, top_k: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits with outlier channels, as hidden states have them, and distinct experts of each token."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    x[:, rng.integers(0, hidden, max(1, hidden // 50))] *= 20
    return narrow_bf16(x), np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
