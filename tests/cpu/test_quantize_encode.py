"""The native encoder against the float64 reference, byte for byte, on inputs chosen to be hard."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_cases import NATIVE, random_expert, sizes_for
from moet.checkpoint.weights import Matrix
from moet.errors import CheckpointError, QuantizeError
from moet.layout import RowGeometry, check_row, unpack_row
from moet.layout import reference as layout_reference
from moet.layout.planes import Sym2Matrix
from moet.quantize import encode_row, reference
from quantize_cases import FORMATS, KINDS, SCALE_KINDS, encode_matrix, hard_matrix

MULTIPLIERS = [1.0, 3.0e-5, -0.37, 1.1754944e-38, 1.4e-45, 3.4e38, 0.0]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    scale_kind=st.sampled_from(SCALE_KINDS),
    multiplier=st.sampled_from(MULTIPLIERS),
)
def test_equals_the_float64_reference(format, seed, kinds, scale_kind, multiplier):
    matrix = hard_matrix(seed, format, 32, 32, kinds, scale_kind, multiplier)
    expected = reference.encode(matrix)
    for portable in (False, True):
        codes, scales, report, _ = encode_matrix(matrix, portable=portable)
        assert np.array_equal(scales, expected.scales)
        assert np.array_equal(codes, expected.codes)
        zero = expected.values == 0
        assert report.weights == 1024 and report.alternated == expected.alternated
        assert (report.zeros, report.negative_zeros) == (zero.sum(), (zero & np.signbit(expected.values)).sum())
        difference, unit = expected.quantized - expected.values, expected.unit_errors
        assert np.isclose(report.squares, (expected.values**2).sum(), rtol=1e-12, atol=0)
        assert np.isclose(report.errors, (difference**2).sum(), rtol=1e-12, atol=0)
        assert np.isclose(report.unit_squares, (unit**2).sum(), rtol=1e-12, atol=0)
        assert np.isclose(report.unit_bias, unit.sum(), rtol=1e-12, atol=1e-12 * np.abs(unit).sum())


@pytest.mark.parametrize("format", NATIVE)
@pytest.mark.parametrize("biased", [False, True])
def test_whole_rows(format, biased):
    """The row of an odd-sized expert: reference codes in the reference layout, biases and checksums included."""
    for hidden, inter in [s for s in sizes_for(format) if s[0] * s[1] < 10000]:
        geometry = RowGeometry("sym2", hidden, inter, biased)
        expert = random_expert(RowGeometry(format, hidden, inter, biased), seed=4)
        row, portable = np.full(geometry.row_bytes, 1, np.uint8), np.full(geometry.row_bytes, 2, np.uint8)
        report = encode_row(geometry, expert, row)
        assert encode_row(geometry, expert, portable, portable=True) == report and np.array_equal(row, portable)
        matrices = []
        for matrix in (expert.gate, expert.up, expert.down):
            encoded = reference.encode(matrix)
            padded = np.zeros((matrix.rows, -(-matrix.cols // 4) * 4), np.uint8)
            padded[:, : matrix.cols] = encoded.codes
            codes = padded[:, 0::4] | padded[:, 1::4] << 2 | padded[:, 2::4] << 4 | padded[:, 3::4] << 6
            matrices.append(Sym2Matrix(matrix.rows, matrix.cols, codes, encoded.scales, matrix.bias))
        expected = np.empty_like(row)
        layout_reference.pack_row(geometry, *matrices, expected)
        assert np.array_equal(row, expected)
        assert check_row(geometry, row) == []


def test_large_rows_agree_between_versions():
    """Sizes at which every path of the vector code runs: full strips, padded rows, padded columns, several lines a row."""
    for format, hidden, inter in [("mxfp4", 2880, 96), ("mxfp4", 576, 2880), ("nvfp4", 1040, 240), ("fp8", 700, 300), ("bf16", 333, 200)]:
        geometry = RowGeometry("sym2", hidden, inter, False)
        expert = random_expert(RowGeometry(format, hidden, inter, False), seed=9)
        row, portable = np.full(geometry.row_bytes, 1, np.uint8), np.full(geometry.row_bytes, 2, np.uint8)
        assert encode_row(geometry, expert, row) == encode_row(geometry, expert, portable, portable=True)
        assert np.array_equal(row, portable)


def test_mxfp4_is_a_remap_whatever_the_common_scale():
    """The codes depend on the nibbles alone, and the scale byte moves with the source's, as long as nothing is clamped."""
    matrix = hard_matrix(3, "mxfp4", 32, 32, list(KINDS[4:]), "usual")
    results = {}
    for s in (5, 60, 127, 200, 252):
        moved = Matrix("mxfp4", 32, 32, matrix.codes, np.full((32, 1), s, np.uint8), scale_dtype=matrix.scale_dtype)
        codes, scales, report, _ = encode_matrix(moved)
        zero = (codes.size and scales == 0).all(axis=1)  # of rows that are all zero, the byte is 0
        results[s] = (codes.tobytes(), (scales.astype(int) - s)[~zero].tobytes(), report.unit_bias, report.relative_rms)
    assert len(set(results.values())) == 1


def test_one_signed_zeros_do_not_bias():
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 8, (256, 256), np.uint8) | rng.integers(0, 2, (256, 256), np.uint8) << 3
    codes[rng.random((256, 256)) < 0.3] = 0  # +0 only
    matrix = Matrix("mxfp4", 256, 256, codes[:, 0::2] | codes[:, 1::2] << 4, np.full((256, 8), 120, np.uint8))
    encoded, _, report, _ = encode_matrix(matrix)
    assert report.alternated == 1
    zero = codes == 0
    assert (encoded[zero] == np.where(np.arange(256) % 2 == 1, 1, 2)[np.nonzero(zero)[1]]).all()
    assert abs(report.bias) < 3 * np.sqrt(report.unit_squares) / report.weights
    signed = codes.copy()
    signed[zero & (rng.random((256, 256)) < 0.06)] = 8  # 6 % negative: those are signs, and they are kept
    matrix = Matrix("mxfp4", 256, 256, signed[:, 0::2] | signed[:, 1::2] << 4, matrix.scales)
    encoded, _, report, _ = encode_matrix(matrix)
    assert report.alternated == 0 and (encoded[signed == 8] == 1).all() and (encoded[signed == 0] == 2).all()
    assert report.bias > 0.05


def poisoned(format: str, part: str) -> Matrix:
    matrix = hard_matrix(1, format, 32, 32, ["random"], "usual", 0.5)
    codes, scales, multiplier = matrix.codes.copy(), None if matrix.scales is None else matrix.scales.copy(), matrix.multiplier
    if part == "code" and format == "bf16":
        codes.view(np.uint16)[3, 5] = 0x7F80
    elif part == "code":
        codes[3, 5] = 0xFF
    elif part == "scale":
        scales.reshape(-1)[-1] = {"mxfp4": 255, "nvfp4": 0x7F, "fp8": np.nan, "fp8_row": np.inf}[format]
    else:
        multiplier = float("nan")
    return Matrix(format, 32, 32, codes, scales, multiplier)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(
    "format, part, words",
    [
        ("mxfp4", "scale", "row 31, column 0: .*UE8M0 scale 255"),
        ("nvfp4", "scale", "row 31, column 16: .*E4M3 scale .*0x7f"),
        ("nvfp4", "multiplier", "row 0, column 0: .*multiplier nan"),
        ("fp8", "scale", "row 0, column 0: .*scale nan"),
        ("fp8", "code", "row 3, column 5: .*E4M3 code .*0xff"),
        ("fp8_row", "scale", "row 31, column 0: .*scale inf"),
        ("fp8_row", "code", "row 3, column 5: .*0xff"),
        ("bf16", "code", "row 3, column 5: .*BF16 infinity 0x7f80"),
    ],
)
def test_what_is_not_finite_is_named(format, part, words, portable):
    good, bad = hard_matrix(1, format, 32, 32, ["random"], "usual", 0.5), poisoned(format, part)
    geometry = RowGeometry("sym2", 32, 32, False)
    row = np.empty(geometry.row_bytes, np.uint8)
    for name in ("gate", "up", "down"):
        expert = SimpleNamespace(layer=3, expert=5, **{"gate": good, "up": good, "down": good} | {name: bad})
        with pytest.raises(QuantizeError, match=f"layer 3, expert 5, {name}, {words}"):
            encode_row(geometry, expert, row, portable=portable)


def test_wrong_shapes_are_named():
    geometry = RowGeometry("sym2", 64, 32, False)
    expert = random_expert(RowGeometry("fp8", 64, 64, False))
    with pytest.raises(CheckpointError, match=r"layer 0, expert 0, gate: expected a fp8 matrix \[32, 64\], found fp8 \[64, 64\]"):
        encode_row(geometry, expert, np.empty(geometry.row_bytes, np.uint8))
    with pytest.raises(QuantizeError, match="sym2"):
        encode_row(RowGeometry("fp8", 64, 64, False), expert, np.empty(1 << 16, np.uint8))


def test_threads_do_not_meet():
    geometries = {f: RowGeometry("sym2", 256, 192, False) for f in NATIVE}
    experts = {f: random_expert(RowGeometry(f, 256, 192, False), 1) for f in NATIVE}

    def encode(format: str) -> bytes:
        row = np.empty(geometries[format].row_bytes, np.uint8)
        encode_row(geometries[format], experts[format], row)
        return row.tobytes()

    alone = {f: encode(f) for f in NATIVE}
    jobs = [f for f in NATIVE for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert all(row == alone[f] for f, row in zip(jobs, pool.map(encode, jobs)))


def test_values_of_a_row_are_the_quantized_values():
    expert = random_expert(RowGeometry("nvfp4", 96, 96, False), 2)
    geometry = RowGeometry("sym2", 96, 96, False)
    row = np.empty(geometry.row_bytes, np.uint8)
    encode_row(geometry, expert, row)
    for matrix, source in zip(unpack_row(geometry, row), (expert.gate, expert.up, expert.down)):
        assert np.array_equal(layout_reference.dequantize(matrix), reference.encode(source).quantized)


@pytest.mark.parametrize("draw, searched, rounded, within", [("normal", 0.361, 0.369, 0.001), ("t4", 0.428, 0.445, 0.006)])
def test_the_search_is_worth_what_the_document_says(draw, searched, rounded, within):
    """docs/quantization.md: relative error of the search, and of the exponent that MXFP4 itself would have, round(log2(max / 6)). A million draws of t4 have heavy tails."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((1024, 1024)) if draw == "normal" else rng.standard_t(4, (1024, 1024))).astype(np.float32)
    matrix = Matrix("bf16", 1024, 1024, np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)))
    assert abs(encode_matrix(matrix)[2].relative_rms - searched) < within
    v = np.abs(reference.exact_values(matrix)).reshape(-1, 32)
    one = np.exp2(np.round(np.log2(v.max(axis=1, keepdims=True) / 6)))
    assert abs(np.sqrt(((v - np.where(v > 2.5 * one, 4 * one, one)) ** 2).sum() / (v**2).sum()) - rounded) < within
