"""Checkpoint to pack, and the pack's rows against the truth, expert by expert."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet.checkpoint import LocalSource
from moet.layout import dequantize_row
from moet.layout import reference as layout_reference
from moet.pack import Pack
from moet.pack.packer import pack
from moet.pack.verify import verify
from tests.e2e.arch import sym2
from tests.generators import Expert, Truth

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class RowsResult:
    """What was compared. `formats`: native format by layer. `base` are the base rows' values, float64, by (layer, expert);
    they equal the independent quantization wherever `wrong` does not say otherwise. `base_error`: sum (q-v)^2 / sum v^2."""

    experts: int
    matrices: int
    formats: dict[int, str]
    wrong: list[str]
    base: dict[tuple[int, int], Expert]
    base_error: float
    verified: bool


def pack_and_compare(source: Path, truth: Truth, out: Path) -> RowsResult:
    """Packs, verifies, and compares every matrix of every expert:

    native  float64 values equal the truth's bit for bit (signed zeros included), and the float32 ones are those rounded once
    base    float64 values equal `sym2.quantize` of the truth bit for bit
    biases  equal, in both
    """
    pack(LocalSource(source), out, workers=1)
    verdict = verify(out)
    opened = Pack.open(out)
    wrong = (
        []
        if set(opened.layers) == set(truth.sites)
        else [f"layers {sorted(opened.layers)}, expected {sorted(truth.sites)}"]
    )
    base: dict[tuple[int, int], Expert] = {}
    error = total = 0.0
    for (layer, index), expert in truth.experts.items():
        files = opened.layers[layer]
        for precision in ("native", "base"):
            rows = files.rows(precision)
            row = np.fromfile(rows.path, np.uint8, rows.geometry.row_bytes, offset=rows.offset(index))
            matrices = layout_reference.unpack_row(rows.geometry, row)
            fast = dequantize_row(rows.geometry, row)
            values = [layout_reference.dequantize(m) for m in matrices]
            if precision == "base":
                biases = [m.bias for m in matrices]
                base[layer, index] = Expert(*values, *biases)
            for name, matrix, value, rounded in zip(PROJECTIONS, matrices, values, fast, strict=True):
                where = f"layer {layer}, expert {index}, {name}, {precision}"
                exact = getattr(expert, name)
                wanted = exact if precision == "native" else sym2.quantize(exact, sym2.zero_signs(exact))
                if precision == "base":
                    error, total = error + ((value - exact) ** 2).sum(), total + (exact**2).sum()
                if not _same(value, wanted):
                    wrong.append(
                        f"{where}: {np.count_nonzero(value != wanted)} of {wanted.size} values differ"
                    )
                if not _same(rounded, value.astype(np.float32)):
                    wrong.append(f"{where}: float32 values are not the float64 values rounded once")
                bias = getattr(expert, f"{name}_bias")
                if (
                    (bias is None) != (matrix.bias is None)
                    or bias is not None
                    and not np.array_equal(bias, matrix.bias)
                ):
                    wrong.append(f"{where}: bias differs")
    formats = {layer: files.native.geometry.format for layer, files in opened.layers.items()}
    wrong += [
        f"layer {n}: packed as {formats.get(n)}, expected {site.format}"
        for n, site in truth.sites.items()
        if formats.get(n) != site.format
    ]
    return RowsResult(
        len(truth.experts), 6 * len(truth.experts), formats, wrong, base, error / total, verdict.ok
    )


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal values and equal signs of zero."""
    return a.shape == b.shape and np.array_equal(a, b) and np.array_equal(np.signbit(a), np.signbit(b))
