"""BF16: unquantized experts. Fused and transposed (gpt-oss in transformers' layout) or not."""

from collections.abc import Mapping

import numpy as np

from moet.checkpoint.parts import Parts
from moet.checkpoint.reader import Span
from moet.checkpoint.weights import Matrix

ROLES = ({"codes"},)
DTYPES = {"codes": ("BF16",)}


def check(parts: Parts) -> str:
    """Raises CheckpointError if a shape is wrong."""
    parts.expect_rows("codes", parts.cols)
    return "bf16"


def build(parts: Parts, raw: Mapping[Span, np.ndarray]) -> Matrix:
    codes = parts.bytes_of("codes", raw, parts.cols * 2, item=2, transposed=parts.transposed)
    return Matrix("bf16", parts.rows, parts.cols, codes, bias=parts.bias(raw))
