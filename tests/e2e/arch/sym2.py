"""The 2-bit format, written again from its definition (docs/quantization.md) and not from moet's code."""

import numpy as np


def quantize(v: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Values [N, K] float64 to the base row's values. Per block of 32 along K, L = floor(log2 max|v|): the exponent e of
    L, L-1, ... L-4 with the least sum of (v-q)^2 in column order; q is sign * 2^e, or sign * 4 * 2^e where |v| > 2.5 * 2^e.
    `signs` (+1, -1) decides where v is 0."""
    rows, cols = v.shape
    padded = np.pad(v, ((0, 0), (0, -cols % 32))).reshape(rows, -1, 32)
    sign = np.pad(signs, ((0, 0), (0, -cols % 32)), constant_values=1).reshape(padded.shape)
    sign = np.where(padded > 0, 1, np.where(padded < 0, -1, sign))
    top = np.abs(padded).max(-1)
    highest = np.where(top > 0, np.frexp(top)[1] - 1, -127)
    best, least = np.zeros_like(padded), np.full(top.shape, np.inf)
    real = np.arange(padded.shape[1] * 32).reshape(-1, 32) < cols
    for drop in range(5):
        unit = np.exp2(np.clip(highest - drop, -127, 127).astype(np.float64))[..., None]
        q = sign * np.where(np.abs(padded) > 2.5 * unit, 4 * unit, unit)
        error = np.zeros(top.shape)
        for column in range(32):  # the order is part of the definition
            error = error + np.where(real[:, column], (padded[..., column] - q[..., column]) ** 2, 0)
        better = (error < least) & ((drop == 0) | (top > 0))
        best, least = np.where(better[..., None], q, best), np.where(better, error, least)
    return best.reshape(rows, -1)[:, :cols]


def zero_signs(v: np.ndarray) -> np.ndarray:
    """+1 and -1 for a matrix's zeros: their own sign, or by column parity (odd: -1) when fewer than 5 % have the rarer one."""
    zero, negative = v == 0, np.signbit(v)
    rarer = min((zero & negative).sum(), (zero & ~negative).sum())
    if zero.any() and rarer < 0.05 * zero.sum():
        return np.broadcast_to(np.where(np.arange(v.shape[1]) % 2, -1, 1), v.shape)
    return np.where(negative, -1, 1)
