"""Sizes of rows and slices, against numbers worked out by hand from docs/row-format.md."""

import pytest

from moet.errors import ConfigError
from moet.layout import FORMATS, RowGeometry

BLOCK_BYTES = {"sym2": 576, "mxfp4": 1088, "nvfp4": 1152, "fp8": 2064, "fp8_row": 2304, "bf16": 4096, "tcq2": 576}


def test_block_bytes():
    assert {f: RowGeometry(f, 64, 32, False).block_bytes for f in FORMATS} == BLOCK_BYTES


def test_worked_example():
    """hidden 4096, inter 2048: 64 tiles of 128 w13 blocks and 64 w2 blocks."""
    g = RowGeometry("sym2", 4096, 2048, False)
    assert (g.tiles, g.hidden_padded, g.inter_padded) == (64, 4096, 2048)
    assert g.w13_tile_bytes == 128 * 576 == 73728 and g.w2_tile_bytes == 64 * 576
    assert g.w2_offset == 64 * 73728 and g.extras_offset == 64 * (73728 + 36864) == 7077888
    assert g.row_bytes == 7077888 + 4096  # extras: 16 + 512 + 4 bytes
    assert RowGeometry("mxfp4", 4096, 2048, False).row_bytes == 64 * 192 * 1088 + 4096


def test_worked_example_with_padding_and_biases():
    """hidden 2880 is 45 x 64; inter 2880 is 90 tiles."""
    g = RowGeometry("mxfp4", 2880, 2880, True)
    assert (g.tiles, g.hidden_padded) == (90, 2880)
    assert g.w13_tile_bytes == 90 * 1088 + 256 and g.w2_tile_bytes == 45 * 1088
    assert g.crc_offset == g.extras_offset + 16 + 4 * 2880
    assert g.row_bytes % 4096 == 0 and g.row_bytes - (g.crc_offset + 8 * 90 + 4) < 4096
    assert (RowGeometry("fp8", 80, 80, False).hidden_padded, RowGeometry("fp8", 80, 80, False).inter_padded) == (128, 96)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_slices_tile_the_row(format, world):
    g = RowGeometry(format, 192, 576, True)
    parts = [g.slice(rank, world) for rank in range(world)]
    assert [p.tile_begin for p in parts] == [0] + [p.tile_end for p in parts[:-1]] and parts[-1].tile_end == g.tiles
    for segment, (start, end) in enumerate([(0, g.w2_offset), (g.w2_offset, g.extras_offset)]):
        at = start
        for p in parts:
            assert p.segments[segment][0] == at
            at += p.segments[segment][1]
        assert at == end
    assert all(p.segments[2] == (g.extras_offset, g.row_bytes - g.extras_offset) for p in parts)
    assert all(p.nbytes == sum(n for _, n in p.segments) for p in parts)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("int4", 64, 32, False), "int4"),
        (("mxfp4", 80, 32, False), "multiple of 32"),
        (("nvfp4", 64, 40, False), "multiple of 16"),
        (("bf16", 0, 32, False), "hidden"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ConfigError, match=words):
        RowGeometry(*arguments)


def test_slice_refusals():
    g = RowGeometry("sym2", 64, 64, False)
    with pytest.raises(ConfigError, match="2 tiles"):
        g.slice(0, 3)
    with pytest.raises(ConfigError, match="rank"):
        g.slice(2, 2)
