"""Rounding to the narrow formats of published checkpoints, and their values, in numpy alone.

Written apart from `moet.numerics` on purpose; tests compare it with torch's own float8 and bfloat16 conversions.
Values are float64; every product of an element and its scales is exact in float64.
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8_MAX, FP4_MAX = 448.0, 6.0


def _e4m3_values() -> np.ndarray:
    """All 256 E4M3 (the "fn" flavour) codes as float64; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value)


E4M3 = _e4m3_values()


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the value of an ascending, non-negative grid nearest to |x|, ties to the even index; saturates at the end."""
    middle = (grid[1:] + grid[:-1]) / 2
    x = np.abs(x)
    low = np.searchsorted(middle, x, side="left")
    high = np.searchsorted(middle, x, side="right")
    return np.where(low % 2 == 0, low, high)  # low != high only on a tie, where they are neighbours


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; the 16-bit patterns as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, saturating at 448; uint8 codes. Keeps the sign of zero."""
    return (nearest(x, E4M3[:127]) | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, saturating at 6; uint8 codes 0..15. A small negative becomes code 8, minus zero."""
    return (nearest(x, E2M1[:8]) | (np.signbit(x).astype(np.int64) << 3)).astype(np.uint8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [N, K] codes to uint8 [N, K/2]: the low nibble is the even column."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def power_of_two_above(x: np.ndarray) -> np.ndarray:
    """UE8M0 byte of the smallest power of two that is not below x; an all-zero block gets 2^-20."""
    return (np.ceil(np.log2(np.maximum(x, 2.0**-20))).astype(np.int64) + 127).astype(np.uint8)


def ue8m0(byte: np.ndarray) -> np.ndarray:
    return np.exp2(byte.astype(np.float64) - 127)


def blocks(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """max |x| per block of a matrix [N, K]: float64 [ceil(N/rows), ceil(K/cols)]; the last block of a line may be partial."""
    n, k = x.shape
    padded = np.zeros((-(-n // rows) * rows, -(-k // cols) * cols))
    padded[:n, :k] = np.abs(x)
    return padded.reshape(padded.shape[0] // rows, rows, -1, cols).max((1, 3))


def spread(scale: np.ndarray, rows: int, cols: int, shape: tuple[int, int]) -> np.ndarray:
    """A scale per block, repeated to one per element of a matrix of that shape."""
    return np.repeat(np.repeat(scale, rows, 0), cols, 1)[: shape[0], : shape[1]]
