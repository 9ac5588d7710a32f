"""MXFP8 in plain numpy (OCP Microscaling Formats v1.0: E4M3 codes, a UE8M0 scale for 32 columns): the oracle of mxfp8.cuh."""

import numpy as np

from moet.kernels.expert_mlp.reference import e4m3

_VALUES = e4m3(np.arange(127))   # 0 to 448, ascending


def quantize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes, uint8 [..., columns], and scales, uint8 [..., blocks], of float32 or float64 [..., columns]; the last block may be short.

    A scale is the smallest power of two, from 2^-127 up, at which no code of its block saturates (the standard's example rounds it down: then up to an eighth of a
    block's largest value is lost). Codes are rounded to nearest even. A block with an infinity or a NaN has the scale 255, which is NaN, whatever its codes are.
    """
    columns = values.shape[-1]
    blocks = np.pad(values.astype(np.float64), [(0, 0)] * (values.ndim - 1) + [(0, -columns % 32)]).reshape(*values.shape[:-1], -1, 32)
    most = np.abs(blocks).max(-1)
    finite = np.isfinite(most)
    fraction, exponent = np.frexp(np.where(finite, most, 1.0))   # fraction from 1/2 to 1; 448 is 7/8 of 2^9
    shift = np.maximum(exponent - 9 + (fraction > 0.875), -127)
    shift = np.where(most == 0, -127, shift)
    scaled = np.where(finite[..., None], blocks, 0.0) * 2.0 ** -shift[..., None]
    step = 2.0 ** (np.maximum(np.frexp(scaled)[1] - 1, -6) - 3)
    codes = np.searchsorted(_VALUES, np.abs(np.rint(scaled / step) * step)) | np.signbit(scaled) << 7
    return codes.astype(np.uint8).reshape(*values.shape[:-1], -1)[..., :columns], np.where(finite, shift + 127, 255).astype(np.uint8)


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [..., columns]."""
    powers = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    return e4m3(codes) * np.repeat(powers, 32, axis=-1)[..., : codes.shape[-1]]


def rounded(values: np.ndarray) -> np.ndarray:
    """float64: what MXFP8 makes of the values."""
    return dequantize(*quantize(values))


def column_order(bits: int) -> np.ndarray:
    """int [32]: the column of its block that the kernels store at each position, for weights of 2, 4 or 8 bits a code (scaled_weights.cuh)."""
    t, j = np.divmod(np.arange(32), 8)   # eight positions for each of the four lanes of a row
    if bits == 2:
        return 16 * (t % 2) + t // 2 + 2 * j
    if bits == 4:
        return 8 * t + 2 * (j % 4) + j // 4
    return 16 * (j // 4) + 4 * t + j % 4
