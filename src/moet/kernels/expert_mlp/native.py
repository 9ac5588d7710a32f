"""ctypes side of native/kernels and native/moe."""

import ctypes
import functools
from typing import Self

import numpy as np

from moet import native
from moet.errors import ConfigError, MoetError
from moet.layout import RowGeometry
from moet.models import Activation

# Number formats of the activations; the index is the number the native code knows. fp32: float32 products with fused multiply-add.
# int8, int16, int24: per 32 columns as integers of 1, 2 or 3 bytes times one scale, for 2- and 4-bit rows; other rows use fp32 then.
ACTIVATIONS = ("fp32", "int8", "int16", "int24")

_i32 = ctypes.c_int32
_error = [ctypes.c_char_p, ctypes.c_size_t]


class CActivation(ctypes.Structure):
    """moet::Activation of native/kernels/activations.h."""

    _fields_ = [("kind", _i32), ("limited", _i32), ("limit", ctypes.c_float), ("alpha", ctypes.c_float)]


def c_activation(activation: Activation) -> CActivation:
    """Raises ConfigError for a kind that the kernels do not know."""
    kinds = ("swiglu", "swiglu_oai")
    if activation.kind not in kinds:
        raise ConfigError(f"activation: expected one of {', '.join(kinds)}, found {activation.kind!r}")
    return CActivation(kinds.index(activation.kind), activation.limit is not None, activation.limit or 0.0, activation.alpha)


@functools.cache
def lib() -> ctypes.CDLL:
    """The native library with the kernels' functions typed."""
    library = native.lib()
    library.moet_isa.restype = ctypes.c_char_p
    library.moet_set_isa.argtypes = [ctypes.c_char_p, *_error]
    library.moet_moe_open.argtypes = [_i32, ctypes.POINTER(ctypes.c_void_p), *_error]
    library.moet_moe_close.argtypes, library.moet_moe_close.restype = [ctypes.c_void_p], None
    library.moet_expert_mlp.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(_i32), ctypes.POINTER(ctypes.c_void_p), _i32, _i32, _i32, ctypes.POINTER(CActivation), _i32,
        ctypes.c_void_p, _i32, ctypes.c_void_p, *_error,
    ]  # fmt: skip
    return library


def isa() -> str:
    """Instruction set of the kernels that run: "avx512", "avx2" or "portable"."""
    return lib().moet_isa().decode()


def set_isa(name: str) -> None:
    """Forces the instruction set for the whole process; "auto" is the machine's best. The results have the same bits on each.

    Raises ConfigError if the machine lacks it.
    """
    native.call(lib().moet_set_isa, name.encode(), error=ConfigError)


class Threads:
    """The threads and the scratch memory of the kernels, until close(). One call at a time may use it."""

    def __init__(self, count: int) -> None:
        self._handle = ctypes.c_void_p()
        native.call(lib().moet_moe_open, count, ctypes.byref(self._handle), error=ConfigError)

    @property
    def handle(self) -> ctypes.c_void_p:
        """moet::Forward*. Raises MoetError after close()."""
        if not self._handle:
            raise MoetError("kernel threads: expected open ones, found closed ones")
        return self._handle

    def close(self) -> None:
        if self._handle:
            lib().moet_moe_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def expert_mlp(
    geometry: RowGeometry, row: np.ndarray, x: np.ndarray, activation: Activation, *,
    rank: int = 0, world: int = 1, activations: str = "int24", threads: Threads | None = None,
) -> np.ndarray:  # fmt: skip
    """float32 [tokens, hidden] = the expert in `row`, uint8 [row_bytes], applied to x, float32 [tokens, hidden].

    rank, world: only that tensor-parallel rank's part of the intermediate dimension; the ranks' results add up to the whole, down bias included.
    activations: one of ACTIVATIONS. The same bits for any number of tokens or threads and on every instruction set.
    """
    if row.dtype != np.uint8 or row.shape != (geometry.row_bytes,) or not row.flags.c_contiguous:
        raise MoetError(f"row: expected contiguous uint8 [{geometry.row_bytes}], found {row.dtype} {list(row.shape)}")
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != geometry.hidden or not x.flags.c_contiguous:
        raise MoetError(f"x: expected contiguous float32 [tokens, {geometry.hidden}], found {x.dtype} {list(x.shape)}")
    if activations not in ACTIVATIONS:
        raise ConfigError(f"activations: expected one of {', '.join(ACTIVATIONS)}, found {activations!r}")
    if threads is None:
        with Threads(1) as own:
            return expert_mlp(geometry, row, x, activation, rank=rank, world=world, activations=activations, threads=own)
    part = geometry.slice(rank, world)
    segments = (ctypes.c_void_p * 3)(*[row.ctypes.data + offset for offset, _ in part.segments])
    sizes = (_i32 * 4)(geometry.format_index, geometry.hidden, geometry.inter, geometry.biased)
    out = np.full(x.shape, np.nan, np.float32)
    native.call(
        lib().moet_expert_mlp, threads.handle, sizes, segments, part.tile_begin, part.tile_end - part.tile_begin, rank == 0,
        ctypes.byref(c_activation(activation)), ACTIVATIONS.index(activations), x.ctypes.data, len(x), out.ctypes.data,
    )  # fmt: skip
    return out
