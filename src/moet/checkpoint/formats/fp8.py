"""FP8: E4M3 with a scale per block, per row, or per matrix, which MULTIPLIES whatever it is called
(`weight_scale_inv` too).

DeepSeek, GLM, Qwen, MiniMax: `weight_scale_inv` [ceil(N/128), ceil(K/128)] in F32, BF16 or F16; DeepSeek V4:
`scale` in F32 or E8M0;
llmcompressor: `weight_scale` BF16, [N/128, K/128] or [N, 1]; modelopt: `weight_scale` F32, [] or [N/128, 1,
K/128, 1].
"""

from collections.abc import Mapping

import numpy as np

from moet.checkpoint.parts import FLOATS, Parts
from moet.checkpoint.reader import Span
from moet.checkpoint.weights import GRANULE, Matrix, scale_shape

ROLES = ({"codes", "scale"},)
DTYPES = {"codes": ("F8_E4M3",), "scale": (*FLOATS, "F8_E8M0")}

BLOCKS = (32, 64, 128, 256, 512, 1024)
"""Sizes of (square) blocks that are recognised. Two powers of two never give the same number of blocks unless
that is 1: shapes decide."""


def check(parts: Parts) -> str:
    """ "fp8" or "fp8_row". Raises CheckpointError if a shape is wrong, or the scale is for no known
    blocks."""
    parts.expect_rows("codes", parts.cols)
    shape = _flat_shape(parts)
    if shape in ((parts.stored, 1), (parts.stored,)) and parts.stored > 1:
        return "fp8_row"
    if shape and _block(parts, shape) is None:
        kind = (
            "one for each 32 columns of a row (MXFP8)"
            if shape == (parts.stored, -(-parts.cols // 32))
            else "of another kind"
        )
        raise parts.pieces["scale"].wrong(
            f"scales for {parts.stored} rows and {parts.cols} columns "
            f"per square block of {', '.join(map(str, BLOCKS))}, per row, or one",
            f"{list(parts.pieces['scale'].shape)}, {kind}",
        )
    if shape and parts.transposed:
        raise parts.pieces["scale"].wrong("one scale for a transposed matrix")
    cut = parts.select.step is not None or (parts.rows % GRANULE and parts.stored != parts.rows)
    if shape and cut:
        raise parts.pieces["scale"].wrong(
            f"gate and up halves of a multiple of {GRANULE} rows", f"{parts.rows} rows"
        )
    return "fp8"


def build(parts: Parts, raw: Mapping[Span, np.ndarray]) -> Matrix:
    """Raises CheckpointError for a scale that is not finite."""
    values, shape = parts.floats("scale", raw), _flat_shape(parts)
    kind = check(parts)
    if kind == "fp8_row":
        scales = np.ascontiguousarray(values[parts.select])
    elif not shape:
        scales = np.full(scale_shape("fp8", parts.rows, parts.cols), values[0], np.float32)
    else:
        # The last block may be partial: 576 rows have 5 of 128. Where gate and up are fused the cut is
        # between granules (checked), even if it
        # is inside a block.
        block = _block(parts, shape)
        rows = np.arange(0, parts.stored, GRANULE)[
            slice(*(n and n // GRANULE for n in (parts.select.start, parts.select.stop)))
        ]
        scales = np.ascontiguousarray(
            values.reshape(shape)[np.ix_(rows // block, np.arange(0, parts.cols, GRANULE) // block)]
        )
    codes = parts.bytes_of("codes", raw, parts.cols, transposed=parts.transposed)
    return Matrix(
        kind, parts.rows, parts.cols, codes, scales, bias=parts.bias(raw), scale_dtype=parts.dtype("scale")
    )


def _flat_shape(parts: Parts) -> tuple[int, ...]:
    """The scale's shape: () for one value, and modelopt's [a, 1, b, 1] as (a, b)."""
    shape = parts.pieces["scale"].shape
    if all(n == 1 for n in shape):
        return ()
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else shape


def _block(parts: Parts, shape: tuple[int, ...]) -> int | None:
    """The block size that gives a scale of this shape, or None."""
    return next((b for b in BLOCKS if (-(-parts.stored // b), -(-parts.cols // b)) == shape), None)
