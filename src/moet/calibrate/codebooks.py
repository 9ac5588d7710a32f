"""The codebook of each 2-bit row format."""

import torch

from moet.calibrate.encode import Codebook, Codes
from moet.calibrate.scalar import Scalar
from moet.calibrate.trellis import Trellis, scale_values

CODEBOOKS: dict[str, Codebook] = {"sym2": Scalar(), "tcq2": Trellis()}
TCQ2_UNIT = 3.0
"""Of `tcq2`'s scale: the sign bias is told in units in which the outer levels are 4 (`sym2`) or 5 (`tcq2`)."""


def codebook_of(row_format: str) -> Codebook:
    return CODEBOOKS[row_format]


def unit_of(row_format: str, codes: Codes) -> torch.Tensor:
    """float32 [G, N, ceil(K / 32)]: what a group's sign bias is told in."""
    if row_format == "sym2":
        return torch.exp2(codes.scales.float() - 127)
    return TCQ2_UNIT * scale_values(codes.scales, codes.multiplier)
