"""The C structures that layout and quantize hand to native code, and the checks that make doing so safe."""

import ctypes
from typing import Any

import numpy as np

from moet.errors import PackError
from moet.layout.geometry import RowGeometry


class CGeometry(ctypes.Structure):
    """moet::RowGeometry of native/include/row.h."""

    _fields_ = [(name, ctypes.c_int32) for name in ("format", "hidden", "inter", "biased")]


class CMatrix(ctypes.Structure):
    """moet::MatrixView of native/layout/matrix.h."""

    _fields_ = [("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("multiplier", ctypes.c_float)]


def c_geometry(geometry: RowGeometry) -> CGeometry:
    return CGeometry(geometry.format_index, geometry.hidden, geometry.inter, geometry.biased)


def c_matrices(*matrices: Any) -> ctypes.Array:
    """CMatrix[len(matrices)]; the caller keeps the arrays alive."""
    return (CMatrix * len(matrices))(*[CMatrix(_address(m.codes), _address(m.scales), _address(m.bias), m.multiplier) for m in matrices])


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def check_row_buffer(geometry: RowGeometry, row: np.ndarray, *, writable: bool) -> None:
    """Raises PackError unless `row` is uint8 [row_bytes], contiguous, and writable where it has to be."""
    if row.dtype != np.uint8 or row.shape != (geometry.row_bytes,) or not row.flags.c_contiguous:
        raise PackError(f"row buffer: expected contiguous uint8 [{geometry.row_bytes}], found {row.dtype} {list(row.shape)}, strides {row.strides}")
    if writable and not row.flags.writeable:
        raise PackError("row buffer: expected a writable array, found a read-only one")
