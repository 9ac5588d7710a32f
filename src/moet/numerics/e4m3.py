"""E4M3 in the "fn" variant (no infinity): bias 7, 448 is the largest value, 0x7f and 0xff are NaN. OCP 8-bit
Floating Point (OFP8) v1.0, table 2."""

import numpy as np


def _table() -> np.ndarray:
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[byte & 0x7F == 0x7F] = np.nan
    return np.where(byte & 0x80, -magnitude, magnitude)


E4M3 = _table()
"""Value of each byte, float64; exact in float32 too."""


def decode_e4m3(codes: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """uint8 [...] -> values [...] of `dtype` (float32 or float64), exact."""
    return E4M3.astype(dtype)[codes]
