"""Sizes and offsets inside a row: arithmetic only. native/include/row.h is its C++ twin; tests compare the two through the rows they make."""

from dataclasses import dataclass

from moet.errors import ConfigError

FORMATS = ("sym2", "mxfp4", "nvfp4", "fp8", "fp8_row", "bf16", "tcq2")  # the index is the number the native code knows
BASE_FORMATS = ("sym2", "tcq2")  # the 2-bit ones
TILE = 32  # intermediate values a tile: the unit of tensor parallelism
BLOCK_ROWS = 64
BLOCK_COLS = 32
PAGE = 4096  # O_DIRECT reads whole pages, so a row is a whole number of them

_BITS = {"sym2": 2, "tcq2": 2, "mxfp4": 4, "nvfp4": 4, "fp8": 8, "fp8_row": 8, "bf16": 16}
_SCALE_BYTES = {"sym2": 64, "tcq2": 64, "mxfp4": 64, "nvfp4": 128, "fp8": 16, "fp8_row": 256, "bf16": 0}
_GROUP = {"mxfp4": 32, "nvfp4": 16}  # columns that share a scale in the checkpoint: it stores whole groups only


@dataclass(frozen=True)
class RowSlice:
    """A tensor-parallel rank's part of a row: tiles [tile_begin, tile_end) and the (offset, length) in bytes of w13, w2 and extras."""

    tile_begin: int
    tile_end: int
    segments: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.segments)


@dataclass(frozen=True)
class RowGeometry:
    """Where everything lies in the rows of one layer at one format.

    format: one of FORMATS. hidden, inter: the model's dimensions (gate and up are [inter, hidden], down is [hidden, inter]).
    biased: the expert has biases. Raises ConfigError if a dimension does not suit the format.
    """

    format: str
    hidden: int
    inter: int
    biased: bool

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"row format: expected one of {', '.join(FORMATS)}, found {self.format!r}")
        for name in ("hidden", "inter"):
            value, group = getattr(self, name), _GROUP.get(self.format, 1)
            if not isinstance(value, int) or not 0 < value < 1 << 24 or value % group:
                raise ConfigError(f"{self.format} row, {name}: expected a positive multiple of {group}, found {value!r}")

    @property
    def format_index(self) -> int:
        return FORMATS.index(self.format)

    @property
    def bits(self) -> int:
        return _BITS[self.format]

    @property
    def block_code_bytes(self) -> int:
        return BLOCK_ROWS * BLOCK_COLS * self.bits // 8

    @property
    def block_scale_bytes(self) -> int:
        return _SCALE_BYTES[self.format]

    @property
    def block_bytes(self) -> int:
        return self.block_code_bytes + self.block_scale_bytes

    @property
    def hidden_padded(self) -> int:
        return -(-self.hidden // 64) * 64

    @property
    def inter_padded(self) -> int:
        return -(-self.inter // TILE) * TILE

    @property
    def tiles(self) -> int:
        return self.inter_padded // TILE

    @property
    def w13_tile_bytes(self) -> int:
        return self.hidden_padded // BLOCK_COLS * self.block_bytes + (4 * BLOCK_ROWS if self.biased else 0)

    @property
    def w2_tile_bytes(self) -> int:
        return self.hidden_padded // BLOCK_ROWS * self.block_bytes

    @property
    def w2_offset(self) -> int:
        return self.tiles * self.w13_tile_bytes

    @property
    def extras_offset(self) -> int:
        return self.w2_offset + self.tiles * self.w2_tile_bytes

    @property
    def bias_offset(self) -> int:
        """Of the down bias, float32 [hidden_padded], if biased."""
        return self.extras_offset + 16

    @property
    def crc_offset(self) -> int:
        """Of uint32 [2 * tiles]: CRC-32C of each w13 tile, then of each w2 tile."""
        return self.bias_offset + (4 * self.hidden_padded if self.biased else 0)

    @property
    def row_bytes(self) -> int:
        used = self.crc_offset + 8 * self.tiles + 4
        return -(-used // PAGE) * PAGE

    def slice(self, rank: int, world: int) -> RowSlice:
        """The part of rank `rank` of `world`: tiles [rank*T//world, (rank+1)*T//world). Raises ConfigError if the rank is out of range or gets no tile."""
        if not 0 <= rank < world:
            raise ConfigError(f"tensor-parallel rank: expected 0 <= rank < {world}, found {rank}")
        begin, end = rank * self.tiles // world, (rank + 1) * self.tiles // world
        if begin == end:
            raise ConfigError(
                f"tensor parallelism {world}: an expert of intermediate size {self.inter} has {self.tiles} tiles of {TILE}, "
                f"so rank {rank} would get none; use at most {self.tiles} ranks"
            )
        w13 = (begin * self.w13_tile_bytes, (end - begin) * self.w13_tile_bytes)
        w2 = (self.w2_offset + begin * self.w2_tile_bytes, (end - begin) * self.w2_tile_bytes)
        return RowSlice(begin, end, (w13, w2, (self.extras_offset, self.row_bytes - self.extras_offset)))
