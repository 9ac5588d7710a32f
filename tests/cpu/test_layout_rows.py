"""Rows: the native code against the numpy reference, byte for byte, and the promises of docs/row-format.md."""

import numpy as np
import pytest

from layout_cases import assert_same_matrix, random_expert, sizes_for
from moet.errors import CheckpointError, PackError
from moet.layout import FORMATS, RowGeometry, check_row, check_slice, dequantize_row, pack_row, reference, unpack_row

CASES = [(f, h, i, biased) for f in FORMATS for h, i in sizes_for(f) for biased in (False, True)]


def packed(geometry: RowGeometry, seed: int = 0):
    expert = random_expert(geometry, seed)
    row = np.full(geometry.row_bytes, 0xA5, np.uint8)  # whatever is not written shows
    pack_row(geometry, expert.gate, expert.up, expert.down, row)
    return expert, row


@pytest.mark.parametrize("format, hidden, inter, biased", CASES)
def test_native_equals_reference_both_ways(format, hidden, inter, biased):
    geometry = RowGeometry(format, hidden, inter, biased)
    expert, row = packed(geometry)
    expected = np.empty_like(row)
    reference.pack_row(geometry, expert.gate, expert.up, expert.down, expected)
    assert np.array_equal(row, expected), f"first difference at {np.flatnonzero(row != expected)[:5]}"
    for unpack in (unpack_row, reference.unpack_row):
        for found, matrix in zip(unpack(geometry, row), (expert.gate, expert.up, expert.down)):
            assert_same_matrix(found, matrix)
    assert check_row(geometry, row) == reference.check_row(geometry, row) == []
    for found, exact in zip(dequantize_row(geometry, row), reference.dequantize_row(geometry, row)):
        assert found.dtype == np.float32 and found.tobytes() == exact.astype(np.float32).tobytes()
