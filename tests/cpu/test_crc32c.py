"""CRC-32C: published vectors, hardware against tables against the byte-by-byte reference."""

import numpy as np
import pytest

from moet.layout import crc32c, crc32c_combine, reference

# RFC 3720, appendix B.4, and the usual check value.
VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.mark.parametrize("data, expected", VECTORS)
def test_published_vectors(data, expected):
    assert crc32c(data) == crc32c(data, portable=True) == reference.crc32c(data) == expected


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 575, 576, 577, 1152, 6143, 6144, 6145, 7000, 20011])
def test_all_versions_agree_and_continue(size):
    data = np.random.default_rng(size).integers(0, 256, size + 3, np.uint8)[3:]  # unaligned
    expected = reference.crc32c(data)
    assert crc32c(data) == crc32c(data, portable=True) == expected
    for cut in (0, 1, size // 3, size):
        assert crc32c(data[cut:], crc32c(data[:cut])) == expected
        assert crc32c(data[cut:], reference.crc32c(data[:cut]), portable=True) == expected
        assert crc32c_combine(crc32c(data[:cut]), crc32c(data[cut:]), size - cut) == expected


def test_every_single_bit_counts():
    data = np.random.default_rng(0).integers(0, 256, 640, np.uint8)
    expected = crc32c(data)
    for bit in range(0, data.size * 8, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != expected
        data[bit // 8] ^= 1 << bit % 8
