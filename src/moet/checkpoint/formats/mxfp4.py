"""MXFP4: E2M1 with a UE8M0 scale per 32 columns. DeepSeek V4 (I8, F8_E8M0), gpt-oss (`_blocks` [N, K/32, 16],
U8), compressed-tensors and
modelopt (U8, U8). A U8 scale is the same exponent byte, never a linear factor."""

from collections.abc import Mapping

import numpy as np

from moet.checkpoint.parts import Parts
from moet.checkpoint.reader import Span
from moet.checkpoint.weights import Matrix
from moet.numerics import ue8m0_has_nan

ROLES = ({"codes", "scale"},)
DTYPES = {"codes": ("U8", "I8"), "scale": ("F8_E8M0", "U8")}


def check(parts: Parts) -> str:
    """Raises CheckpointError if a shape is wrong, or the columns are no multiple of 32."""
    if parts.cols % 32:
        raise parts.pieces["codes"].wrong("a multiple of 32 columns", parts.cols)
    parts.expect_shape("codes", (parts.stored, parts.cols // 2), (parts.stored, parts.cols // 32, 16))
    parts.expect_shape("scale", (parts.stored, parts.cols // 32))
    return "mxfp4"


def build(parts: Parts, raw: Mapping[Span, np.ndarray]) -> Matrix:
    """Raises CheckpointError for a NaN scale."""
    scales = parts.bytes_of("scale", raw, parts.cols // 32)
    if ue8m0_has_nan(scales):
        row, block = np.argwhere(scales == 255)[0]
        raise parts.pieces["scale"].wrong(
            "scales that are numbers", f"NaN (byte 255) in row {row}, block {block}"
        )
    codes = parts.bytes_of("codes", raw, parts.cols // 2)
    return Matrix(
        "mxfp4", parts.rows, parts.cols, codes, scales, bias=parts.bias(raw), scale_dtype=parts.dtype("scale")
    )
