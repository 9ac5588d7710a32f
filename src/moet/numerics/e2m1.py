"""E2M1 (FP4): sign, two exponent bits, one mantissa bit. OCP Microscaling Formats (MX) v1.0, table 5: 0, 0.5,
1, 1.5, 2, 3, 4, 6 and their negatives."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
"""Value of each code 0..15; bit 3 is the sign, so code 8 is -0. Every value is exact in float32 and
float64."""


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., K / 2] -> uint8 codes [..., K]. The low nibble is the even column (DeepSeek, modelopt,
    compressed-tensors, gpt-oss alike)."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes


def pack_e2m1(codes: np.ndarray) -> np.ndarray:
    """uint8 codes 0..15 [..., K], K even -> uint8 [..., K / 2], low nibble first."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def decode_e2m1(packed: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """uint8 [..., K / 2] -> values [..., K] of `dtype` (float32 or float64), exact."""
    return E2M1.astype(dtype)[unpack_e2m1(packed)]
