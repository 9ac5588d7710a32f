"""Native expert to 2-bit row, in native code."""

import ctypes
import functools

import numpy as np

from moet import native
from moet.checkpoint.weights import ExpertWeights
from moet.errors import CheckpointError, QuantizeError
from moet.layout.binding import CGeometry, CMatrix, c_geometry, c_matrices, check_row_buffer
from moet.layout.geometry import RowGeometry
from moet.layout.planes import PROJECTIONS, check_matrix
from moet.quantize.report import RowReport, matrix_report


class _CReport(ctypes.Structure):
    """moet::EncodeReport of native/quantize/encode.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("weights", "zeros", "negative_zeros", "alternated")] + [
        (name, ctypes.c_double) for name in ("squares", "errors", "unit_bias", "unit_squares")
    ]


@functools.cache
def _encode_row():
    function = native.lib().moet_encode_row
    function.argtypes = [
        ctypes.POINTER(CGeometry), ctypes.c_int32, ctypes.POINTER(CMatrix), ctypes.c_void_p,
        ctypes.POINTER(_CReport), ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    return function


def encode_row(geometry: RowGeometry, expert: ExpertWeights, out: np.ndarray, *, portable: bool = False) -> RowReport:
    """Writes the 2-bit row of `expert` into out, uint8 [row_bytes]; every byte of it, checksums included.

    geometry: of format "sym2", with the expert's dimensions. Releases the GIL and may run in several threads at once. portable: no vector instructions
    beyond the CPU's baseline; same bytes. Raises CheckpointError if a matrix does not suit the geometry, QuantizeError naming layer, expert, matrix, row
    and column if a weight or scale is NaN or infinite; the row's contents are then undefined.
    """
    if geometry.format != "sym2":
        raise QuantizeError(f"encode_row: expected a sym2 geometry, found {geometry.format}")
    name = f"layer {expert.layer}, expert {expert.expert}"
    format = expert.gate.format
    matrices = (expert.gate, expert.up, expert.down)
    try:
        source = RowGeometry(format, geometry.hidden, geometry.inter, geometry.biased)
        for projection, matrix in zip(PROJECTIONS, matrices):
            check_matrix(source, projection, matrix, format, source.bits)
    except CheckpointError as e:
        raise CheckpointError(f"{name}, {e}") from None
    check_row_buffer(geometry, out, writable=True)
    reports = (_CReport * 3)()
    try:
        native.call(
            _encode_row(), c_geometry(geometry), source.format_index, c_matrices(*matrices), out.ctypes.data, reports, portable, error=QuantizeError
        )
    except QuantizeError as e:
        raise QuantizeError(f"{name}, {e}; the checkpoint is damaged, download it again or compare it with its source") from None
    return RowReport(*[
        matrix_report(r.weights, r.zeros, r.negative_zeros, r.alternated, (r.squares, r.errors, r.unit_bias, r.unit_squares)) for r in reports
    ])
