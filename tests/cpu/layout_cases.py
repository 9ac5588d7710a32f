"""Random experts in every format, for the tests of layout and quantize."""

from types import SimpleNamespace

import numpy as np

from moet.layout import BASE_FORMATS, FORMATS, RowGeometry
from moet.layout.planes import PROJECTIONS, make_matrix, plane_layout, shapes

NATIVE = [f for f in FORMATS if f not in BASE_FORMATS]


def sizes_for(format: str) -> list[tuple[int, int]]:
    """(hidden, inter) that are whole, padded, odd and larger than one tile, as far as the format allows."""
    group = {"mxfp4": 32, "nvfp4": 16}.get(format, 1)
    return [(h, f) for h, f in [(64, 32), (96, 96), (80, 80), (192, 576), (576, 192), (100, 37), (320, 80)] if not (h % group or f % group)]


def random_matrix(rng: np.random.Generator, geometry: RowGeometry, projection: str):
    """All codes that are finite, scales of the size that checkpoints have, zeros among both."""
    g, (rows, cols) = geometry, shapes(geometry, projection)
    code_shape, scale_shape, dtype = plane_layout(g.format, rows, cols, g.bits)
    if g.format == "bf16":
        values = (rng.standard_normal((rows, cols)) * 0.02).astype(np.float32)
        values[rng.random((rows, cols)) < 0.05] = 0
        codes = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        codes = rng.integers(0, 256, code_shape, np.uint8)
        if g.bits == 8:
            codes[codes & 0x7F == 0x7F] -= 1
        if g.format in BASE_FORMATS and cols % 4:
            codes[:, -1] &= (1 << 2 * (cols % 4)) - 1
    scales = None
    if scale_shape and dtype is np.float32:
        scales = (rng.standard_normal(scale_shape).astype(np.float32) ** 2) * np.float32(0.01)
    elif g.format == "tcq2":
        scales = rng.integers(16, 96, scale_shape, np.uint8)   # 2^-13 to 2^-3
    elif g.format == "nvfp4":
        scales = rng.integers(1, 0x7F, scale_shape, np.uint8)
    elif scale_shape:
        scales = rng.integers(110, 125, scale_shape, np.uint8)
    multiplier = float(np.float32(rng.uniform(1e-4, 1e-3))) if g.format in ("nvfp4", "tcq2") else 1.0
    bias = rng.standard_normal(rows).astype(np.float32) if g.biased else None
    return make_matrix(g, projection, np.ascontiguousarray(codes), scales, multiplier, bias)


def random_expert(geometry: RowGeometry, seed: int = 0) -> SimpleNamespace:
    """An object with gate, up, down as `moet.checkpoint.ExpertWeights` has them (that class knows no 2-bit formats)."""
    rng = np.random.default_rng(seed)
    return SimpleNamespace(layer=0, expert=0, **{name: random_matrix(rng, geometry, name) for name in PROJECTIONS})


def assert_same_matrix(found, expected) -> None:
    assert (found.format, found.rows, found.cols, found.multiplier) == (expected.format, expected.rows, expected.cols, expected.multiplier)
    for part in ("codes", "scales", "bias"):
        a, b = getattr(found, part), getattr(expected, part)
        assert (a is None) == (b is None), part
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), part
            assert a.tobytes() == b.tobytes(), part
