"""What goes into a row and comes out of it: the three matrices of an expert, native (`moet.checkpoint.Matrix`) or at 2 bits (`Sym2Matrix`, `Tcq2Matrix`)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moet.checkpoint.weights import Matrix
from moet.errors import CheckpointError
from moet.layout.geometry import BLOCK_COLS, RowGeometry

PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Sym2Matrix:
    """One projection at 2 bits, with the fields of `moet.checkpoint.Matrix`.

    codes: uint8 [rows, ceil(cols / 4)], code of column k at bits 2 * (k % 4); 0, 1, 2, 3 mean -4, -1, +1, +4.
    scales: uint8 [rows, ceil(cols / 32)], 2**(byte - 127). bias: float32 [rows] or None.
    """

    rows: int
    cols: int
    codes: np.ndarray
    scales: np.ndarray
    bias: np.ndarray | None = None
    format: str = "sym2"
    multiplier: float = 1.0


@dataclass(frozen=True)
class Tcq2Matrix:
    """One projection at 2 bits, trellis-coded, with the fields of `moet.checkpoint.Matrix`.

    codes: uint8 [rows, ceil(cols / 4)], code of column k at bits 2 * (k % 4); moet.numerics.decode_tcq2 gives their levels. Codes past the last column
    are zero: the last column's level depends on the one after it. scales: uint8 [rows, ceil(cols / 32)], UE5M3. multiplier: of the whole matrix.
    bias: float32 [rows] or None.
    """

    rows: int
    cols: int
    codes: np.ndarray
    scales: np.ndarray
    multiplier: float = 1.0
    bias: np.ndarray | None = None
    format: str = "tcq2"


def shapes(geometry: RowGeometry, projection: str) -> tuple[int, int]:
    """(rows, cols) of "gate", "up" or "down"."""
    return (geometry.hidden, geometry.inter) if projection == "down" else (geometry.inter, geometry.hidden)


def plane_layout(format: str, rows: int, cols: int, bits: int) -> tuple[tuple[int, int], tuple[int, ...] | None, type | None]:
    """Shape of the codes (uint8), shape and dtype of the scales (None: the format has none)."""
    groups = -(-cols // BLOCK_COLS)
    scales = {
        "sym2": ((rows, groups), np.uint8),
        "tcq2": ((rows, groups), np.uint8),
        "mxfp4": ((rows, groups), np.uint8),
        "nvfp4": ((rows, cols // 16), np.uint8),
        "fp8": ((-(-rows // 32), groups), np.float32),
        "fp8_row": ((rows,), np.float32),
        "bf16": (None, None),
    }[format]
    return (rows, -(-cols * bits // 8)), *scales


def make_matrix(geometry: RowGeometry, projection: str, codes: np.ndarray, scales: np.ndarray | None, multiplier: float, bias: np.ndarray | None) -> Any:
    """The dataclass of the geometry's format."""
    rows, cols = shapes(geometry, projection)
    if geometry.format == "sym2":
        return Sym2Matrix(rows, cols, codes, scales, bias)
    if geometry.format == "tcq2":
        return Tcq2Matrix(rows, cols, codes, scales, multiplier, bias)
    return Matrix(geometry.format, rows, cols, codes, scales, multiplier, bias)


def check_matrix(geometry: RowGeometry, projection: str, matrix: Any, format: str, bits: int) -> None:
    """Raises CheckpointError unless `matrix` has the format, shapes, dtypes and memory order that native code is going to read."""
    rows, cols = shapes(geometry, projection)
    if (matrix.format, matrix.rows, matrix.cols) != (format, rows, cols):
        raise CheckpointError(
            f"{projection}: expected a {format} matrix [{rows}, {cols}], found {matrix.format} [{matrix.rows}, {matrix.cols}]"
        )
    codes, scales, dtype = plane_layout(format, rows, cols, bits)
    _check_array(projection, "codes", matrix.codes, codes, np.uint8)
    _check_array(projection, "scales", matrix.scales, scales, dtype)
    _check_array(projection, "bias", matrix.bias, (rows,) if geometry.biased else None, np.float32)


def _check_array(projection: str, part: str, array: np.ndarray | None, shape: tuple[int, ...] | None, dtype: type | None) -> None:
    found = None if array is None else (array.shape, array.dtype.name)
    expected = None if shape is None else (shape, np.dtype(dtype).name)
    if found != expected:
        raise CheckpointError(f"{projection}, {part}: expected {expected or 'none'}, found {found or 'none'}")
    if array is not None and not array.flags.c_contiguous:
        raise CheckpointError(f"{projection}, {part}: expected a C-contiguous array, found strides {array.strides}")
