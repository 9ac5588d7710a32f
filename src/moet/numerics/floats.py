"""BF16 and F16 (IEEE binary16): widening to float32 is exact. numpy has no BF16, so its bits travel as
uint16, little-endian as in safetensors."""

import numpy as np


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 [...] -> float32 [...]: BF16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bf16(values: np.ndarray) -> np.ndarray:
    """float32 [...] -> BF16 bits, uint16 [...], rounded to nearest even; NaN stays NaN (quiet)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def widen_f16(bits: np.ndarray) -> np.ndarray:
    """uint16 [...] -> float32 [...]."""
    return bits.view(np.float16).astype(np.float32)
