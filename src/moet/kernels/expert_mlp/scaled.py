"""Where MXFP8 activations (scaled.cuh) take the place of bf16 in a prefill."""

from moet.config import PrefillActivations
from moet.kernels.expert_mlp.cuda import SOURCES

SCALED_SOURCES = ("expert_mlp/scaled.cuh",)
SCALED_FORMATS = ("sym2", "tcq2", "mxfp4", "fp8", "fp8_row")
"""Row formats whose levels are E4M3 numbers with one scale for 32 columns; nvfp4 and bf16 rows keep bf16 activations."""
SCALED_CAPABILITY = (8, 9)
"""The oldest GPUs that have E4M3. Block scales in the tensor cores are sm_120a's; others emulate them, and are slower than with bf16."""


def is_scaled(format: str, activations: PrefillActivations) -> bool:
    return activations == "mxfp8" and format in SCALED_FORMATS


def sources(format: str, activations: PrefillActivations) -> tuple[str, ...]:
    """Of the module of a row format."""
    return (*SOURCES, *SCALED_SOURCES) if is_scaled(format, activations) else SOURCES


def mxfp8_row_bytes(columns: int) -> int:
    """Of a row's codes, whole stages of 128 columns, and its scales."""
    return -(-columns // 128) * 132
