"""Committed vectors: neither the reference nor the native encoder may move, because packs that exist were made with these codes."""

import json
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoint.weights import Matrix
from moet.layout.planes import plane_layout
from moet.quantize import reference
from quantize_cases import BITS, encode_matrix

GOLDEN = json.loads((Path(__file__).parent / "golden" / "quantize.json").read_text())


def matrix_of(case: dict) -> Matrix:
    format, rows, cols = case["format"], case["rows"], case["cols"]
    codes_shape, scale_shape, _ = plane_layout(format, rows, cols, BITS[format])
    codes = np.frombuffer(bytes.fromhex(case["codes"]), np.uint8).reshape(codes_shape)
    scales = case["scales"] and np.frombuffer(bytes.fromhex(case["scales"]["hex"]), case["scales"]["dtype"]).reshape(scale_shape)
    return Matrix(format, rows, cols, codes, scales, float(np.frombuffer(bytes.fromhex(case["multiplier"]), np.float32)[0]))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['format']}-{c['kinds'][0]}-{len(c['kinds'])}")
def test_golden(case):
    matrix = matrix_of(case)
    codes = np.array([[int(c) for c in row] for row in case["sym2_codes"]], np.uint8)
    scales = np.frombuffer(bytes.fromhex(case["sym2_scales"]), np.uint8).reshape(-1, 1)
    encoded = reference.encode(matrix)
    assert np.array_equal(encoded.codes, codes) and np.array_equal(encoded.scales, scales)
    for portable in (False, True):
        found_codes, found_scales, report, _ = encode_matrix(matrix, portable=portable)
        assert np.array_equal(found_codes, codes) and np.array_equal(found_scales, scales)
        assert report.alternated == case["alternated"]


def test_golden_covers_all():
    assert {c["format"] for c in GOLDEN} == set(BITS) and {c["alternated"] for c in GOLDEN} == {False, True}


# Worked by hand from docs/quantization.md: MXFP4 nibbles, common scale byte, expected scale byte and codes.
HAND = [
    # 4 four times, 1 elsewhere: e = 0 is exact.
    ([6, 14, 6, 14] + [2, 10] * 14, 127, 127, [3, 0, 3, 0] + [2, 1] * 14),
    # All 3: e = 1 (3 - 2), e = 0 (4 - 3) and lower ones err by the same 1; the larger wins, so every 3 is 1 * 2^1.
    ([5] * 32, 127, 128, [2] * 32),
    # One 6 among 0.5: e = -1 is exact for the small ones and 4 * 2^-1 = 2 leaves 16; e = 0 errs 31 * 0.25 + 4 = 11.75 and wins.
    ([7] + [1] * 31, 100, 100, [3] + [2] * 31),
    # Nothing below the lowest exponent: byte 0 stays 0, though 0.5 * 2^-127 would like less.
    ([1] * 32, 0, 0, [2] * 32),
    # At the top, 6 * 2^127 would like 2^129; 2^127 is the largest scale, and 4 of it the nearest level.
    ([7] * 32, 254, 254, [3] * 32),
]


@pytest.mark.parametrize("nibbles, scale, expected_scale, expected_codes", HAND)
def test_worked_by_hand(nibbles, scale, expected_scale, expected_codes):
    rows = np.tile(np.array(nibbles, np.uint8), (32, 1))
    matrix = Matrix("mxfp4", 32, 32, rows[:, 0::2] | rows[:, 1::2] << 4, np.full((32, 1), scale, np.uint8))
    for portable in (False, True):
        codes, scales, _, _ = encode_matrix(matrix, portable=portable)
        assert (scales == expected_scale).all() and (codes == expected_codes).all()
