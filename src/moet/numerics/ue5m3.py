"""UE5M3: five exponent bits, three mantissa bits, no sign: 2**(byte >> 3) * (1 + (byte & 7) / 8) * 2**-15. Ours, for
the scales of `tcq2` rows (docs/row-format.md): no zero, no subnormals, no NaN, so that all 256 bytes are scales, and
float32's bits are (byte << 20) + (112 << 23)."""

import numpy as np

UE5M3 = np.ldexp(8.0 + np.arange(256) % 8, np.arange(256) // 8 - 18)
"""Value of each byte, float64, ascending from 2**-15 to 122880; exact in float32 too."""


def decode_ue5m3(scales: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """uint8 [...] -> values [...] of `dtype` (float32 or float64), exact."""
    return UE5M3.astype(dtype)[scales]
