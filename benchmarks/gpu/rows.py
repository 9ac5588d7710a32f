"""Rows of random codes at a model's expert geometry, and getting them into pinned memory or onto a disk."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import torch

from moet.layout import RowGeometry

SCALES = {"sym2": (118, 2), "tcq2": (40, 8)}
"""Lowest scale byte and how many follow it: weights of about 2^-6.4 = 1 / sqrt(4096 * 1.8), so that a normalised state of 4096 gives gate and up values of about 0.75."""

PAGE = 4096


@dataclass(frozen=True)
class Shape:
    layers: int = 43
    experts: int = 256
    hidden: int = 4096
    inter: int = 2048
    top_k: int = 6
    format: str = "tcq2"

    @property
    def geometry(self) -> RowGeometry:
        return RowGeometry(self.format, self.hidden, self.inter, False)

    @property
    def rows(self) -> int:
        return self.layers * self.experts

    @property
    def bytes(self) -> int:
        return self.rows * self.geometry.row_bytes


V4_FLASH = Shape()
TINY = Shape(layers=4, experts=32, hidden=256, inter=128, top_k=3)   # 12 rows a step: replaying needs as many slots, and 15 % are 19


def random_rows(geometry: RowGeometry, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """uint8 [count, row_bytes] on the device: codes and scales at random, multipliers 1, checksums left at 0."""
    g, generator = geometry, torch.Generator(device).manual_seed(seed)
    rows = torch.randint(0, 256, (count, g.row_bytes), dtype=torch.uint8, device=device, generator=generator)
    low, span = SCALES[g.format]
    blocks = rows[:, : g.extras_offset].view(count, -1, g.block_bytes)
    scales = blocks[:, :, g.block_code_bytes :]
    scales %= span
    scales += low
    rows[:, g.extras_offset :] = 0
    rows[:, g.extras_offset : g.extras_offset + 12] = torch.ones(3, device=device).view(torch.uint8)
    return rows


def layers_of_rows(shape: Shape, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """(layer, uint8 [experts, row_bytes] in host memory) for every layer, each layer's rows made on the device; a tensor is void once the next is asked for."""
    size = shape.experts * shape.geometry.row_bytes
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = memory[-memory.data_ptr() % PAGE :][:size].view(shape.experts, -1)   # page-aligned, as O_DIRECT asks
    for layer in range(shape.layers):
        host.copy_(random_rows(shape.geometry, shape.experts, layer, device))
        yield layer, host


def put_all(shape: Shape, device: torch.device, put: Callable[[int, int, object], None], threads: int, progress: Callable[[int], None] | None = None) -> None:
    """Hands every row to `put(layer, expert, row)`, `threads` rows at a time."""
    with ThreadPoolExecutor(threads) as pool:
        for layer, rows in layers_of_rows(shape, device):
            list(pool.map(put, repeat(layer), range(shape.experts), rows.numpy()))
            if progress:
                progress(layer)
