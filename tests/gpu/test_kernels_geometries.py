"""DeviceRuntime.forward at real models' expert sizes and at tensor-parallel slices of them, in every format, against float64 within the bounds of its roundings. Needs a GPU."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dequantized import check, decode, layer
from expert_layers import Layers
from random_layers import pairs_of_large

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gemm.rowfill import fill
from gemm.shapes import SHAPES

from moet.layout import FORMATS, RowGeometry, crc32c

SIZES = {name: shape for name, shape in SHAPES.items() if not name.endswith("uniform")}
SLICES = ((1, 2), (0, 4), (3, 4), (0, 8), (4, 8), (7, 8), (0, 2))
"""(rank, world); one for each format and size, so that each size has all seven. 640 columns are 20 tiles and 2880 are 90: eight ranks have 2 or 3, and 11 or 12."""
EXPERTS, TOP_K = 3, 2
TOKENS = ((1, False), (7, False), (2, True), (70, True))
"""Tokens and whether it is a scan: the last are enough for the GEMMs of many tokens."""


def seal(geometry: RowGeometry, row: np.ndarray) -> None:
    """Writes a row's checksums, which a store asks for."""
    g = geometry
    tiles = [row[: g.w2_offset].reshape(g.tiles, -1), row[g.w2_offset : g.extras_offset].reshape(g.tiles, -1)]
    row[g.crc_offset :] = 0
    row[g.crc_offset : g.crc_offset + 8 * g.tiles].view(np.uint32)[:] = [crc32c(tile) for segment in tiles for tile in segment]
    row[-4:].view(np.uint32)[:] = crc32c(row[g.extras_offset : -4])


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_real_sizes_and_their_slices(format, name, opened, emulated):
    if emulated and max(SIZES[name].hidden, SIZES[name].inter) > 256:
        pytest.skip("minutes on the CPU")
    geometry, activation, device = SIZES[name].geometry(format), SIZES[name].activation, "cpu" if emulated else "cuda"
    rows = torch.empty(EXPERTS, geometry.row_bytes, dtype=torch.uint8, device=device)
    fill(geometry, rows, 1)
    layers = Layers({0: geometry}, EXPERTS, activation, {0: rows.cpu().numpy()})
    for row in layers.rows[0]:
        seal(geometry, row)
    whole = {e: decode(geometry, row) for e, row in enumerate(rows)}
    generator = torch.Generator(device).manual_seed(2)
    turn = (FORMATS.index(format) + list(SIZES).index(name)) % len(SLICES)
    for rank, world in ((0, 1), SLICES[turn]):
        experts = {e: expert.part(geometry, rank, world) for e, expert in whole.items()}
        runtime = opened(layers, top_k=TOP_K, rank=rank, world=world)
        for tokens, scan in TOKENS:
            x = torch.randn(tokens, geometry.hidden, device=device, generator=generator)
            x[:, :: geometry.hidden // 40] *= 10
            ids = torch.rand(tokens, EXPERTS, device=device, generator=generator).argsort(1)[:, :TOP_K].int().contiguous()
            weights = torch.rand(tokens, TOP_K, device=device, generator=generator)
            found = runtime.forward(0, x.bfloat16(), weights, ids, None, scan)
            many = pairs_of_large(runtime, format, tokens, EXPERTS, TOP_K, scan)
            check(found, layer(experts, x.bfloat16(), weights, ids, activation, many), (name, format, rank, world, tokens, scan))
