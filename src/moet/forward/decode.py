"""Native matrices to float32 on a device: the values of `moet.checkpoint.dequantize`, computed where they are needed."""

import numpy as np
import torch

from moet.checkpoint import Matrix
from moet.checkpoint.weights import GRANULE, SCALE_COLUMNS
from moet.numerics import E2M1

_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1).astype(np.float32)
"""The two E2M1 values of a byte, [256, 2]: the low nibble is the even column."""


def decode(matrix: Matrix, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [rows, cols], the same numbers as dequantize(matrix, numpy.float32)."""
    codes = torch.from_numpy(matrix.codes).to(device)
    if matrix.format == "bf16":
        return codes.view(torch.bfloat16).float()
    scales = torch.from_numpy(matrix.scales).to(device)
    if matrix.format in SCALE_COLUMNS:
        pairs = torch.from_numpy(_PAIRS).to(device)
        values = pairs[codes.int()].view(matrix.rows, -1, SCALE_COLUMNS[matrix.format])
        values = values * _scale(matrix.format, scales)[:, :, None]
        values = values.reshape(matrix.rows, matrix.cols)
        return values * float(np.float32(matrix.multiplier)) if matrix.multiplier != 1 else values
    values = codes.view(torch.float8_e4m3fn).float()
    if matrix.format == "fp8_row":
        return values.mul_(scales[:, None])
    rows = scales.repeat_interleave(GRANULE, dim=0)[: matrix.rows]
    return values.mul_(rows.repeat_interleave(GRANULE, dim=1)[:, : matrix.cols])


def _scale(format: str, scales: torch.Tensor) -> torch.Tensor:
    """float32 of E8M0 or E4M3 bytes; none of them is NaN (the reader refuses that)."""
    if format == "nvfp4":
        return scales.view(torch.float8_e4m3fn).float()
    exponents = scales.int()
    # 2^-127 is subnormal: it has no exponent of its own.
    return torch.where(exponents > 0, exponents << 23, torch.full_like(exponents, 1 << 22)).view(
        torch.float32
    )
