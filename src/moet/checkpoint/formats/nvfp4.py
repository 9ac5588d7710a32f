"""NVFP4: E2M1 with an E4M3 scale per 16 columns and one float32 per matrix. modelopt's `weight_scale_2`
multiplies; compressed-tensors'
`weight_global_scale` is its reciprocal and is inverted here, in float32. gate and up keep their own: they may
differ. modelopt's
gpt-oss is fused and transposed: U8 [E, K/2, N], scales [E, K/16, N], packed along K all the same."""

from collections.abc import Mapping

import numpy as np

from moet.checkpoint.parts import Parts
from moet.checkpoint.reader import Span
from moet.checkpoint.weights import Matrix

ROLES = ({"codes", "scale", "multiplier"}, {"codes", "scale", "divisor"})
DTYPES = {"codes": ("U8", "I8"), "scale": ("F8_E4M3",), "multiplier": ("F32",), "divisor": ("F32",)}


def check(parts: Parts) -> str:
    """Raises CheckpointError if a shape is wrong, or the columns are no multiple of 16."""
    if parts.cols % 16:
        raise parts.pieces["codes"].wrong("a multiple of 16 columns", parts.cols)
    parts.expect_rows("codes", parts.cols // 2)
    parts.expect_rows("scale", parts.cols // 16)
    parts.expect_shape("multiplier" if "multiplier" in parts.pieces else "divisor", (), (1,), (1, 1))
    return "nvfp4"


def build(parts: Parts, raw: Mapping[Span, np.ndarray]) -> Matrix:
    """Raises CheckpointError for a scale that is NaN or has a sign (hardware and kernels read them without
    one), or a factor that is not positive and finite (in either spelling)."""
    scales = parts.bytes_of("scale", raw, parts.cols // 16, transposed=parts.transposed)
    if scales.max(initial=0) >= 0x7F:
        row, block = np.argwhere(scales >= 0x7F)[0]
        raise parts.pieces["scale"].wrong("scales that are numbers from 0 to 448", f"E4M3 {scales[row, block]:#04x} in row {row}, block {block}")
    role = "multiplier" if "multiplier" in parts.pieces else "divisor"
    factor = parts.floats(role, raw)[0]
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = factor if role == "multiplier" else np.float32(1) / factor
    if not 0 < multiplier < np.inf:
        raise parts.pieces[role].wrong("a positive finite factor", factor)
    codes = parts.bytes_of("codes", raw, parts.cols // 2, transposed=parts.transposed)
    return Matrix(
        "nvfp4",
        parts.rows,
        parts.cols,
        codes,
        scales,
        float(multiplier),
        parts.bias(raw),
        parts.dtype("scale"),
    )
