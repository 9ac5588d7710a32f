"""Matrices to row bytes and back. `reference` has the same functions in plain numpy; both give the same bytes."""

import ctypes
import functools
from typing import Any

import numpy as np

from moet import native
from moet.errors import PackError
from moet.layout.binding import CGeometry, CMatrix, c_geometry, c_matrices, check_row_buffer
from moet.layout.geometry import RowGeometry, RowSlice
from moet.layout.planes import PROJECTIONS, check_matrix, make_matrix, plane_layout, shapes


@functools.cache
def _function(name: str):
    function = getattr(native.lib(), f"moet_{name}")
    geometry, matrices, pointer = ctypes.POINTER(CGeometry), ctypes.POINTER(CMatrix), ctypes.c_void_p
    error = [ctypes.c_char_p, ctypes.c_size_t]
    function.argtypes = {
        "pack_row": [geometry, matrices, pointer, *error],
        "unpack_row": [geometry, pointer, matrices, *error],
        "dequantize_row": [geometry, pointer, pointer, pointer, pointer, *error],
        "check_slice": [geometry, ctypes.c_int32, ctypes.c_int32, pointer, pointer, pointer, pointer, *error],
    }[name]
    return function


def pack_row(geometry: RowGeometry, gate: Any, up: Any, down: Any, out: np.ndarray) -> None:
    """Writes the row of an expert into out, uint8 [row_bytes]; every byte of it, checksums included.

    gate, up, down: `moet.checkpoint.Matrix`, or `Sym2Matrix` or `Tcq2Matrix` where the geometry says so.
    Raises CheckpointError if a matrix does not suit the geometry, PackError if `out` does not.
    """
    for name, matrix in zip(PROJECTIONS, (gate, up, down)):
        check_matrix(geometry, name, matrix, geometry.format, geometry.bits)
    check_row_buffer(geometry, out, writable=True)
    native.call(_function("pack_row"), c_geometry(geometry), c_matrices(gate, up, down), out.ctypes.data, error=PackError)


def unpack_row(geometry: RowGeometry, row: np.ndarray) -> tuple[Any, Any, Any]:
    """(gate, up, down) bit for bit as they went in; FP8 scales come back a granule of 32 x 32 each, whatever blocks the checkpoint had."""
    check_row_buffer(geometry, row, writable=False)
    multipliers = row[geometry.extras_offset : geometry.extras_offset + 12].view(np.float32)
    matrices = []
    for name, multiplier in zip(PROJECTIONS, multipliers):
        rows, cols = shapes(geometry, name)
        codes, scales, dtype = plane_layout(geometry.format, rows, cols, geometry.bits)
        bias = np.empty(rows, np.float32) if geometry.biased else None
        scale_array = np.empty(scales, dtype) if scales else None
        matrices.append(make_matrix(geometry, name, np.empty(codes, np.uint8), scale_array, float(multiplier), bias))
    native.call(_function("unpack_row"), c_geometry(geometry), row.ctypes.data, c_matrices(*matrices), error=PackError)
    return tuple(matrices)


def dequantize_row(geometry: RowGeometry, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of gate, up [inter, hidden] and down [hidden, inter] as float32: the exact value, rounded once."""
    check_row_buffer(geometry, row, writable=False)
    out = tuple(np.empty(shapes(geometry, name), np.float32) for name in PROJECTIONS)
    native.call(_function("dequantize_row"), c_geometry(geometry), row.ctypes.data, *(a.ctypes.data for a in out), error=PackError)
    return out


def check_row(geometry: RowGeometry, row: np.ndarray) -> list[str]:
    """Names of the parts whose checksum does not hold: "w13 tile 3", "w2 tile 0", "extras". Empty: the row is intact."""
    check_row_buffer(geometry, row, writable=False)
    return check_slice(geometry, geometry.slice(0, 1), *_segments(row, geometry.slice(0, 1)))


def check_slice(geometry: RowGeometry, part: RowSlice, w13: np.ndarray, w2: np.ndarray, extras: np.ndarray) -> list[str]:
    """`check_row` of a rank's slice: its three segments, uint8, which need not be adjacent. Tiles are named by their number in the whole row."""
    for name, array, (_, length) in zip(("w13", "w2", "extras"), (w13, w2, extras), part.segments):
        if array.dtype != np.uint8 or array.shape != (length,) or not array.flags.c_contiguous:
            raise PackError(f"row slice, {name}: expected contiguous uint8 [{length}], found {array.dtype} {list(array.shape)}")
    bad = np.zeros(2 * geometry.tiles + 1, np.uint8)
    native.call(
        _function("check_slice"), c_geometry(geometry), part.tile_begin, part.tile_end,
        w13.ctypes.data, w2.ctypes.data, extras.ctypes.data, bad.ctypes.data, error=PackError,
    )
    tiles = geometry.tiles
    names = [f"w13 tile {t}" for t in range(tiles)] + [f"w2 tile {t}" for t in range(tiles)] + ["extras"]
    return [name for name, flag in zip(names, bad) if flag]


def _segments(row: np.ndarray, part: RowSlice) -> tuple[np.ndarray, ...]:
    return tuple(row[offset : offset + length] for offset, length in part.segments)
