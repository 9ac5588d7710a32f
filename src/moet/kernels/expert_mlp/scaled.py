"""The GEMMs of a prefill with MXFP8 activations (scaled.cuh): their arguments and buffers, and where they can be used."""

import ctypes
from ctypes import c_int64, c_void_p

from moet.kernels.expert_mlp.cuda import MlpArgs

SCALED_SOURCES = ("expert_mlp/scaled.cuh",)
SCALED_FORMATS = ("sym2", "tcq2", "mxfp4", "fp8", "fp8_row")
"""Row formats whose levels are E4M3 numbers with one scale for 32 columns; nvfp4 and bf16 rows keep bf16 activations."""
SCALED_CAPABILITY = (8, 9)
"""The oldest GPUs that have E4M3. It is sm_120a that multiplies E4M3 with block scales at twice bf16's rate and more; others emulate that, and are slower than with bf16."""
SCALED_THREADS, QUANTIZE_THREADS = 128, 256
SCALED_STRIPS = 4   # of a block


class Mxfp8(ctypes.Structure):
    """See mxfp8.cuh."""

    _fields_ = [("codes", c_void_p), ("scales", c_void_p), ("stride", c_int64)]


class ScaledArgs(ctypes.Structure):
    _fields_ = [("mlp", MlpArgs), ("x", Mxfp8), ("act", Mxfp8)]


def mxfp8_stride(columns: int) -> int:
    """Codes of a row: whole chunks of 128 columns."""
    return -(-columns // 128) * 128


def mxfp8_bytes(rows: int, columns: int) -> int:
    """Of codes and scales together."""
    return rows * mxfp8_stride(columns) // 32 * 33


def mxfp8(address: int, rows: int, columns: int) -> Mxfp8:
    """In mxfp8_bytes of device memory at a 16-byte aligned address: codes, then scales."""
    stride = mxfp8_stride(columns)
    return Mxfp8(address, address + rows * stride, stride)
