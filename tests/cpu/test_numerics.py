"""Number formats against definitions that something else made: torch's float8 types, struct's half precision,
the formulas of the standards."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moet.numerics import (
    E2M1,
    E4M3,
    TCQ2_LEVELS,
    UE5M3,
    UE8M0,
    decode_e2m1,
    decode_e4m3,
    decode_tcq2,
    decode_ue5m3,
    decode_ue8m0,
    narrow_bf16,
    pack_e2m1,
    tcq2_windows,
    ue8m0_has_nan,
    unpack_e2m1,
    widen_bf16,
    widen_f16,
)

BYTES = np.arange(256, dtype=np.uint8)
WORDS = np.arange(65536, dtype=np.uint16)
NIBBLES = arrays(
    np.uint8,
    st.tuples(st.integers(1, 5), st.integers(1, 9).map(lambda n: 2 * n)),
    elements=st.integers(0, 15),
)


def float_of_bits(sign: int, exponent: int, mantissa: int, mantissa_bits: int, bias: int) -> float:
    """IEEE-style decoding, written out: the definition and not a table."""
    if exponent == 0:
        return (-1) ** sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (-1) ** sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_e2m1_is_a_float_with_bias_1(dtype):
    expected = np.array([float_of_bits(c >> 3, c >> 1 & 3, c & 1, 1, 1) for c in range(16)], dtype)
    found = decode_e2m1(pack_e2m1(np.arange(16, dtype=np.uint8)), dtype)
    assert found.dtype == dtype
    assert np.array_equal(found, expected)
    assert np.array_equal(np.signbit(found), np.arange(16) >= 8), "code 8 is -0"
    assert np.array_equal(E2M1, expected)


@given(NIBBLES)
def test_low_nibble_is_the_even_column(codes):
    packed = pack_e2m1(codes)
    assert packed.shape == (codes.shape[0], codes.shape[1] // 2)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            assert packed[row, column // 2] >> 4 * (column % 2) & 15 == codes[row, column]
    assert np.array_equal(unpack_e2m1(packed), codes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_e4m3_by_definition(dtype):
    expected = np.array([float_of_bits(b >> 7, b >> 3 & 15, b & 7, 3, 7) for b in range(256)], dtype)
    expected[[0x7F, 0xFF]] = np.nan
    found = decode_e4m3(BYTES, dtype)
    assert found.dtype == dtype
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[[0, 128]]), [False, True])
    assert np.nanmax(E4M3) == 448


def test_float8_equals_torch():
    torch = pytest.importorskip("torch")
    e4m3 = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    e8m0 = torch.from_numpy(BYTES).view(torch.float8_e8m0fnu).to(torch.float32).numpy()
    assert np.array_equal(decode_e4m3(BYTES, np.float32), e4m3, equal_nan=True)
    assert np.array_equal(decode_ue8m0(BYTES, np.float32), e8m0, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ue8m0_by_definition(dtype):
    found = decode_ue8m0(BYTES, dtype)
    assert found.dtype == dtype
    for byte in range(255):
        assert found[byte] == 2.0 ** (byte - 127) > 0
    assert np.isnan(found[255])
    assert UE8M0[127] == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ue5m3_by_definition(dtype):
    found = decode_ue5m3(BYTES, dtype)
    assert found.dtype == dtype
    for byte in range(256):
        assert found[byte] == 2.0 ** (byte >> 3) * (1 + (byte & 7) / 8) * 2.0**-15
    bits = (BYTES.astype(np.uint32) << 20) + (112 << 23)
    assert np.array_equal(bits.view(np.float32), UE5M3), "as the kernels make them"


def test_tcq2_levels_are_symmetric_odd_and_narrow():
    torch = pytest.importorskip("torch")
    assert np.array_equal(TCQ2_LEVELS[::-1], -TCQ2_LEVELS)
    assert np.array_equal(TCQ2_LEVELS % 2, np.ones(16)) and np.abs(TCQ2_LEVELS).max() == 15
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        assert np.array_equal(torch.from_numpy(TCQ2_LEVELS).to(dtype).double().numpy(), TCQ2_LEVELS)


@pytest.mark.parametrize("cols", [1, 4, 15, 16, 37, 64])
def test_tcq2_windows_by_definition(cols):
    """A window is a code and the next one; the 16th of a word has its own high bit twice; past the end are zeros."""
    rng = np.random.default_rng(cols)
    codes = rng.integers(0, 4, (5, cols))
    packed = np.zeros((5, -(-cols // 4)), np.uint8)
    for k in range(cols):
        packed[:, k // 4] |= (codes[:, k] << 2 * (k % 4)).astype(np.uint8)
    found = tcq2_windows(packed, cols)
    for k in range(cols):
        following = (codes[:, k] >> 1) * 3 if k % 16 == 15 else codes[:, k + 1] if k + 1 < cols else 0
        assert np.array_equal(found[:, k], codes[:, k] + 4 * following)
    assert np.array_equal(decode_tcq2(packed, cols), TCQ2_LEVELS[found])
    if cols % 16 == 0:
        assert np.array_equal(decode_tcq2(~packed, cols), -decode_tcq2(packed, cols))


@given(arrays(np.uint8, st.integers(0, 40)))
def test_nan_bytes_are_found(data):
    assert ue8m0_has_nan(data) == bool(np.isnan(UE8M0[data]).any())


def test_bf16_is_the_upper_half_of_a_float32():
    for bits in range(0, 65536, 37):
        value = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
        found = widen_bf16(np.array([bits], np.uint16))[0]
        assert found == value or (np.isnan(found) and np.isnan(value))
    assert np.array_equal(widen_bf16(WORDS).view(np.uint32), WORDS.astype(np.uint32) << 16)


def test_f16_equals_struct():
    values = np.array([struct.unpack("<e", struct.pack("<H", bits))[0] for bits in range(65536)])
    assert np.array_equal(widen_f16(WORDS), values.astype(np.float32), equal_nan=True)


@given(arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=True)))
def test_narrowing_to_bf16_rounds_to_nearest_even(values):
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    found = narrow_bf16(values)
    nan = np.isnan(values)
    assert np.array_equal(found[~nan], expected[~nan])
    assert np.isnan(widen_bf16(found[nan])).all()
