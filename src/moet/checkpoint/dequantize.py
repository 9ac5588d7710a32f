"""What a native matrix means, in float64 or float32. This is the definition that faster code is tested
against."""

import numpy as np

from moet.checkpoint.weights import GRANULE, SCALE_COLUMNS, ExpertWeights, Matrix
from moet.numerics import decode_e2m1, decode_e4m3, decode_ue8m0, widen_bf16


def dequantize(matrix: Matrix, dtype: type = np.float64) -> np.ndarray:
    """The values, [rows, cols] of `dtype` (float64: exact for every format; float32: each factor exact,
    products rounded once a factor)."""
    if matrix.format == "bf16":
        return widen_bf16(matrix.codes.view("<u2")).astype(dtype)
    if matrix.format in SCALE_COLUMNS:
        values = decode_e2m1(matrix.codes, dtype)
        decode = decode_ue8m0 if matrix.format == "mxfp4" else decode_e4m3
        scales = np.repeat(decode(matrix.scales, dtype), SCALE_COLUMNS[matrix.format], axis=1)
        return values * scales * dtype(matrix.multiplier)
    values = decode_e4m3(matrix.codes, dtype)
    scales = matrix.scales.astype(dtype)
    if matrix.format == "fp8_row":
        return values * scales[:, None]
    return (
        values
        * np.repeat(np.repeat(scales, GRANULE, axis=0)[: matrix.rows], GRANULE, axis=1)[:, : matrix.cols]
    )


def dequantize_expert(
    expert: ExpertWeights, dtype: type = np.float64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gate, up, down): [inter, hidden], [inter, hidden], [hidden, inter]."""
    return dequantize(expert.gate, dtype), dequantize(expert.up, dtype), dequantize(expert.down, dtype)
