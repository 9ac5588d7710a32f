"""BF16: unquantized experts. Fused and transposed (gpt-oss in transformers' layout) or not."""

from collections.abc import Mapping

import numpy as np

from moet.checkpoint.parts import FLOATS, Parts
from moet.checkpoint.reader import Span
from moet.checkpoint.weights import Matrix

ROLES = ({"codes"},)
DTYPES = {"codes": ("BF16",)}


def check(parts: Parts) -> str:
    """Raises CheckpointError if a shape is wrong."""
    parts.expect_shape("codes", (parts.cols, parts.stored) if parts.transposed else (parts.stored, parts.cols))
    return "bf16"


def build(parts: Parts, raw: Mapping[Span, np.ndarray]) -> Matrix:
    if parts.transposed:
        bits = raw[parts.pieces["codes"].span].view("<u2").reshape(parts.cols, parts.stored)
        codes = np.ascontiguousarray(bits.T[parts.select]).view(np.uint8)
    else:
        codes = parts.bytes_of("codes", raw, parts.cols * 2)
    return Matrix("bf16", parts.rows, parts.cols, codes, bias=parts.bias(raw))
