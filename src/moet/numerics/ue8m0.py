"""UE8M0: an exponent alone, 2**(byte - 127); 255 is NaN. OCP Microscaling Formats (MX) v1.0, section
5.4.1."""

import numpy as np

NAN_BYTE = 255

UE8M0 = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan)
"""Value of each byte, float64. Byte 0 (2**-127) is a subnormal in float32, and exact there too."""


def decode_ue8m0(scales: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """uint8 [...] -> powers of two [...] of `dtype` (float32 or float64), exact; 255 gives NaN."""
    return UE8M0.astype(dtype)[scales]


def ue8m0_has_nan(scales: np.ndarray) -> bool:
    """Whether a byte of uint8 [...] is NaN."""
    return bool(scales.max(initial=0) == NAN_BYTE)
