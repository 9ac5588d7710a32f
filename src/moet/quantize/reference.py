"""The definition of docs/quantization.md in float64, written from its text alone: nothing is shared with the native encoder, not even number tables."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Encoded:
    """codes: uint8 [rows, cols], 0 to 3 for -4, -1, +1, +4; scales: uint8 [rows, ceil(cols / 32)]; values, quantized: float64 [rows, cols]."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray
    quantized: np.ndarray
    alternated: bool

    @property
    def unit_errors(self) -> np.ndarray:
        """(q - v) / 2**e, float64 [rows, cols]."""
        exponents = np.repeat(self.scales.astype(np.int64) - 127, 32, axis=1)[:, : self.values.shape[1]]
        return np.ldexp(self.quantized - self.values, -exponents)


def e2m1_value(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    if code & 0x7F == 0x7F:
        magnitude = math.nan
    return -magnitude if sign else magnitude


def exact_values(matrix: Any) -> np.ndarray:
    """What the checkpoint's matrix means, float64 [rows, cols], exact, signed zeros included."""
    rows, cols = matrix.rows, matrix.cols
    if matrix.format == "bf16":
        pairs = matrix.codes.reshape(rows, cols, 2).astype(np.uint32)
        return (pairs[..., 0] << 16 | pairs[..., 1] << 24).view(np.float32).astype(np.float64)
    if matrix.format in ("mxfp4", "nvfp4"):
        nibbles = np.stack([matrix.codes % 16, matrix.codes // 16], axis=2).reshape(rows, cols)
        values = np.array([e2m1_value(c) for c in range(16)])[nibbles]
    else:
        values = np.array([e4m3_value(c) for c in range(256)])[matrix.codes]
    column, row = np.arange(cols), np.arange(rows)
    if matrix.format == "mxfp4":
        return np.ldexp(values, (matrix.scales.astype(np.int64) - 127)[:, column // 32])
    if matrix.format == "nvfp4":
        scale = np.array([e4m3_value(c) for c in range(256)])[matrix.scales] * float(np.float32(matrix.multiplier))
        return values * scale[:, column // 16]
    scales = matrix.scales.astype(np.float64)
    return values * (scales[row // 32][:, column // 32] if matrix.format == "fp8" else scales[:, None])


def zeros_alternate(values: np.ndarray) -> bool:
    """Whether fewer than 5 % of the zeros have one of the two signs."""
    zero = values == 0
    negative = int(np.count_nonzero(zero & np.signbit(values)))
    total = int(np.count_nonzero(zero))
    return min(negative, total - negative) * 100 < 5 * total


def encode_block(values: np.ndarray, first_column: int, alternate: bool) -> tuple[int, list[int]]:
    """Scale byte and codes of up to 32 float64 values, one Python float at a time."""
    v = [float(x) for x in values]
    largest = max(abs(x) for x in v)
    best_e, best_error = -127, math.inf
    if largest > 0:
        top = math.frexp(largest)[1] - 1
        for candidate in range(top, top - 5, -1):
            e = max(-127, min(127, candidate))
            error = 0.0
            for x in v:
                q = 2.0**e * (4 if abs(x) > 2.5 * 2.0**e else 1)
                error += (abs(x) - q) * (abs(x) - q)
            if error < best_error:
                best_e, best_error = e, error
    codes = []
    for i, x in enumerate(v):
        negative = math.copysign(1, x) < 0
        if x == 0 and alternate:
            negative = (first_column + i) % 2 == 1
        big = abs(x) > 2.5 * 2.0**best_e
        codes.append((0 if big else 1) if negative else (3 if big else 2))
    return best_e + 127, codes


def encode(matrix: Any) -> Encoded:
    """2-bit codes and scales of a native matrix."""
    values = exact_values(matrix)
    if not np.isfinite(values).all():
        raise ValueError("reference encoder: expected finite values")
    alternate = zeros_alternate(values)
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((matrix.rows, -(-matrix.cols // 32)), np.uint8)
    for r in range(matrix.rows):
        for b in range(scales.shape[1]):
            at = slice(32 * b, min(32 * b + 32, matrix.cols))
            scales[r, b], codes[r, at] = encode_block(values[r, at], 32 * b, alternate)
    exponents = np.repeat(scales.astype(np.int64) - 127, 32, axis=1)[:, : matrix.cols]
    quantized = np.ldexp(np.array([-4.0, -1.0, 1.0, 4.0])[codes], exponents)
    return Encoded(codes, scales, values, quantized, alternate)
