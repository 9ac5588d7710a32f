"""One routed expert as the checkpoint stores it: its codes, its scales, and nothing converted that has to be
converted back."""

from dataclasses import dataclass

import numpy as np

from moet.errors import CheckpointError

GRANULE = 32
"""Rows and columns of an FP8 granule. Every block size in use (32x32, 128x128) is a multiple, so granules
hold any of them exactly."""

BITS = {"mxfp4": 4, "nvfp4": 4, "fp8": 8, "fp8_row": 8, "bf16": 16}
"""Native formats and the bits of one code."""

SCALE_COLUMNS = {"mxfp4": 32, "nvfp4": 16}
"""Columns that share one scale byte, for the formats that have one byte per row and group."""


@dataclass(frozen=True)
class Matrix:
    """One projection of one expert: `rows` (N) by `cols` (K).

    format      "mxfp4" | "nvfp4" | "fp8" | "fp8_row" | "bf16"
    codes       uint8, C-contiguous [rows, cols * bits // 8]: the checkpoint's own bytes; E2M1's low nibble is
                the even column
    scales      mxfp4: uint8 (UE8M0) [rows, cols / 32]; nvfp4: uint8 (E4M3) [rows, cols / 16];
                fp8: float32 [ceil(rows / 32), ceil(cols / 32)]; fp8_row: float32 [rows]; bf16: None
    multiplier  nvfp4: the float32 value that multiplies every weight; 1.0 for the others
    bias        float32 [rows] or None
    scale_dtype the checkpoint's spelling of the scale's dtype ("F32", "BF16", "F16", "F8_E8M0", "U8",
                "F8_E4M3"), "" for bf16.
                All of them widen exactly to what `scales` holds.
    Raises CheckpointError if a part does not have the shape or the dtype above.
    """

    format: str
    rows: int
    cols: int
    codes: np.ndarray
    scales: np.ndarray | None = None
    multiplier: float = 1.0
    bias: np.ndarray | None = None
    scale_dtype: str = ""

    def __post_init__(self) -> None:
        if self.format not in BITS:
            raise CheckpointError(f"matrix format: expected one of {', '.join(BITS)}, found {self.format!r}")
        self._expect("codes", self.codes, np.uint8, (self.rows, self.cols * BITS[self.format] // 8))
        if self.format == "bf16":
            if self.scales is not None:
                raise CheckpointError("bf16 matrix: expected no scales, found some")
        else:
            kind = np.uint8 if self.format in SCALE_COLUMNS else np.float32
            self._expect("scales", self.scales, kind, scale_shape(self.format, self.rows, self.cols))
        if self.bias is not None:
            self._expect("bias", self.bias, np.float32, (self.rows,))

    def _expect(self, part: str, array: np.ndarray | None, dtype: type, shape: tuple[int, ...]) -> None:
        found = None if array is None else (array.dtype.name, array.shape)
        if found != (np.dtype(dtype).name, shape):
            raise CheckpointError(
                f"{self.format} matrix, {part}: expected {np.dtype(dtype).name} {shape}, found {found}"
            )
        if not array.flags.c_contiguous:
            raise CheckpointError(
                f"{self.format} matrix, {part}: expected a C-contiguous array, found strides {array.strides}"
            )

    @property
    def bits(self) -> int:
        return BITS[self.format]


def scale_shape(format: str, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of `Matrix.scales` for a format that has scales."""
    if format in SCALE_COLUMNS:
        return (rows, cols // SCALE_COLUMNS[format])
    if format == "fp8_row":
        return (rows,)
    return (-(-rows // GRANULE), -(-cols // GRANULE))


@dataclass(frozen=True)
class ExpertWeights:
    """A routed expert. gate and up are [inter, hidden], down is [hidden, inter]; all three have one
    format."""

    layer: int
    expert: int
    gate: Matrix
    up: Matrix
    down: Matrix

    def __post_init__(self) -> None:
        shapes = {(m.rows, m.cols) for m in (self.gate, self.up)} | {(self.down.cols, self.down.rows)}
        formats = {m.format for m in (self.gate, self.up, self.down)}
        if len(shapes) != 1 or len(formats) != 1:
            raise CheckpointError(
                f"layer {self.layer}, expert {self.expert}: expected gate and up [inter, hidden], "
                "down [hidden, inter] in one format, "
                f"found {[(m.format, m.rows, m.cols) for m in (self.gate, self.up, self.down)]}"
            )
