"""Ours: DeviceRuntime with every row in a slot, two layers of random rows. The path that vLLM takes, bookkeeping included."""

import weakref
from types import SimpleNamespace

import torch

from gemm import reference, rowdecode, rowfill
from gemm.shapes import Shape
from moet.kernels.expert_mlp.cuda import MlpArgs
from moet.kernels.expert_mlp.launches import Size
from moet.kernels.gpu.module import Module
from moet.moe.device import DeviceRuntime, LayerState
from moet.store.host import HostClass, SlotLayout

COPIES = {"bf16": 1}
"""Layers of weights; 2 where nothing is said (bf16's experts are larger than an L2 cache, one by one)."""
DECODE = 64
"""Tokens of the largest batch that takes the path of decoding; more are a prefill."""
TOLERANCE = 1e-2
"""Of activations with 8 significant bits."""


class Begun(Exception):
    """A layer's first launch is queued, and no other is wanted."""


class Runtime(DeviceRuntime):
    """only_begin: forward stops where a layer has begun."""

    only_begin = False

    def begin(self, here: LayerState, args: MlpArgs, size: Size, stream: int) -> None:
        super().begin(here, args, size, stream)
        if self.only_begin:
            raise Begun


class ResidentRows:
    """What a runtime asks of a store, where every row is in a slot already: sizes and places, and nothing to fetch."""

    def __init__(self, shape: Shape, format: str) -> None:
        g = shape.geometry(format)
        self.geometry, self.experts = g, shape.experts
        copies = COPIES.get(format, 2)
        self.layers = {i: SimpleNamespace(geometry=g, experts=shape.experts) for i in range(copies)}
        first = {i: i * shape.experts for i in range(copies)}
        self.classes = [HostClass(g.row_bytes, copies * shape.experts, first, 0, 0, 0, True)]
        self.rank, self.world, self.mailbox, self.failures, self.handle = 0, 1, 0, 0, 1
        self.served: weakref.ref | None = None

    def layout(self, layer: int) -> SlotLayout:
        g = self.geometry
        return SlotLayout((0, g.w2_offset, g.extras_offset), g.row_bytes, 0, g.tiles)


def hold_every_row(runtime: DeviceRuntime) -> torch.Tensor:
    """Marks every slot as holding the row of its number; the slots, uint8 [rows, row_bytes], to be filled. There is nothing to fetch them from."""
    arrays, rows = runtime.tables._arrays[0], runtime.store.classes[0].rows
    for numbers in (arrays.slot_of, arrays.row_of):
        numbers.copy_(torch.arange(rows, dtype=torch.int32))
    arrays.valid.fill_(1)
    return arrays.pool.view(rows, -1)


class Ours:
    """See Column. modules: as of DeviceRuntime, for a device that is the CPU."""

    compiles, tolerance = False, TOLERANCE

    def __init__(self, shape: Shape, format: str, device: torch.device, modules: dict[int, Module] | None = None, most: int = 4096, decode: int = DECODE) -> None:
        self.shape, self.geometry = shape, shape.geometry(format)
        self.expert_bytes = float(self.geometry.extras_offset)
        self.store = ResidentRows(shape, format)
        self.copies = len(self.store.layers)
        self.runtime = Runtime(
            self.store, activation=shape.activation, top_k=shape.top_k, device=device, max_tokens=most, decode_tokens=min(decode, most), modules=modules,
        )  # fmt: skip
        self.runtime.allocate()
        self.rows = hold_every_row(self.runtime)
        rowfill.fill(self.geometry, self.rows, seed=1)
        self.runtime.arm()
        self.notes = {"row_bytes": self.geometry.row_bytes, "launches": "DeviceRuntime.forward"}

    def __call__(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.runtime.forward(copy, x, weights, ids, None, len(x) > self.runtime.decode_tokens)

    def begin(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Queues only what comes before the first GEMM."""
        self.runtime.only_begin = True
        try:
            self(copy, x, weights, ids)
        except Begun:
            pass
        finally:
            self.runtime.only_begin = False

    def reference(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        row = lambda e: rowdecode.matrices(self.geometry, self.rows[copy * self.shape.experts + e])
        return reference.layer(row, self.shape.activation, x, weights, ids)

    def close(self) -> None:
        self.runtime.close()


def make(shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> Ours:
    return Ours(shape, format, device, most=max(tokens))
