"""Rows: the native code against the numpy reference, byte for byte, and the promises of docs/row-format.md."""

import numpy as np
import pytest

from layout_cases import assert_same_matrix, random_expert, sizes_for
from moet.checkpoint.weights import Matrix
from moet.errors import CheckpointError, PackError
from moet.layout import FORMATS, RowGeometry, check_row, check_slice, crc32c, dequantize_row, pack_row, reference, unpack_row
from moet.numerics import decode_e4m3

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


@pytest.mark.parametrize("format, hidden, inter, biased", [("mxfp4", 2880, 2880, True), ("fp8", 2880, 80, False), ("bf16", 80, 2880, True)])
def test_native_equals_reference_at_full_size(format, hidden, inter, biased, monkeypatch):
    monkeypatch.setattr(reference, "crc32c", crc32c)  # its own takes a second a megabyte, and test_crc32c holds the two together
    geometry = RowGeometry(format, hidden, inter, biased)
    expert, row = packed(geometry)
    expected = np.empty_like(row)
    reference.pack_row(geometry, expert.gate, expert.up, expert.down, expected)
    assert np.array_equal(row, expected)
    for found, matrix in zip(unpack_row(geometry, row), (expert.gate, expert.up, expert.down)):
        assert_same_matrix(found, matrix)


def test_fp8_source_blocks_become_granules():
    """A 128 x 128 block scale, expanded to granules of 32 x 32, gives the values of the plain block-wise product."""
    rng = np.random.default_rng(1)
    geometry = RowGeometry("fp8", 320, 160, False)
    codes = rng.integers(0, 0x7E, (160, 320), np.uint8)
    blocks = rng.random((2, 3)).astype(np.float32)  # ceil(160 / 128), ceil(320 / 128)
    granules = np.ascontiguousarray(np.repeat(np.repeat(blocks, 4, axis=0), 4, axis=1)[:5, :10])
    gate = Matrix("fp8", 160, 320, codes, granules)
    down = Matrix("fp8", 320, 160, np.ascontiguousarray(codes.T), np.ascontiguousarray(granules.T))
    row = np.empty(geometry.row_bytes, np.uint8)
    pack_row(geometry, gate, gate, down, row)
    values = dequantize_row(geometry, row)[0]
    direct = decode_e4m3(codes, np.float32) * np.repeat(np.repeat(blocks, 128, axis=0), 128, axis=1)[:160, :320]
    assert np.array_equal(values, direct)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_slices_check_themselves(format, world):
    geometry = RowGeometry(format, 64, 288, True)
    _, row = packed(geometry)
    for rank in range(world):
        part = geometry.slice(rank, world)
        w13, w2, extras = (row[at : at + n].copy() for at, n in part.segments)
        assert check_slice(geometry, part, w13, w2, extras) == []
        w2[-1] ^= 1
        assert check_slice(geometry, part, w13, w2, extras) == [f"w2 tile {part.tile_end - 1}"]


@pytest.mark.parametrize("format", FORMATS)
def test_one_flipped_bit_anywhere_is_found(format):
    geometry = RowGeometry(format, 96, 96, True)
    _, row = packed(geometry)
    rng = np.random.default_rng(5)
    positions = [0, geometry.w2_offset, geometry.extras_offset, geometry.crc_offset, geometry.row_bytes - 1]
    for position in [*positions, *rng.integers(0, geometry.row_bytes, 200)]:
        flip = np.uint8(1 << rng.integers(8))
        row[position] ^= flip
        bad = check_row(geometry, row)
        if position < geometry.w2_offset:
            assert bad == [f"w13 tile {position // geometry.w13_tile_bytes}"]
        elif position < geometry.extras_offset:
            assert bad == [f"w2 tile {(position - geometry.w2_offset) // geometry.w2_tile_bytes}"]
        else:
            assert "extras" in bad
        row[position] ^= flip
    assert check_row(geometry, row) == []


def test_refusals():
    geometry = RowGeometry("mxfp4", 64, 32, False)
    expert, row = packed(geometry)
    with pytest.raises(CheckpointError, match=r"gate: expected a mxfp4 matrix \[32, 64\], found mxfp4 \[64, 32\]"):
        pack_row(geometry, expert.down, expert.up, expert.down, row)
    with pytest.raises(CheckpointError, match="gate, bias"):
        pack_row(RowGeometry("mxfp4", 64, 32, True), expert.gate, expert.up, expert.down, np.empty(1 << 16, np.uint8))
    with pytest.raises(PackError, match="row buffer"):
        pack_row(geometry, expert.gate, expert.up, expert.down, row[:-1])
    row.flags.writeable = False
    with pytest.raises(PackError, match="writable"):
        pack_row(geometry, expert.gate, expert.up, expert.down, row)
    assert check_row(geometry, row) == []
