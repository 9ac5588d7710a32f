"""The row: all bytes of one routed expert at one format. docs/row-format.md is the definition, `reference` the plain numpy twin of the native code."""

from moet.layout.crc import crc32c, crc32c_combine
from moet.layout.geometry import BASE_FORMATS, FORMATS, RowGeometry, RowSlice
from moet.layout.rows import check_row, check_slice, dequantize_row, pack_row, unpack_row

__all__ = [
    "BASE_FORMATS",
    "FORMATS",
    "RowGeometry",
    "RowSlice",
    "check_row",
    "check_slice",
    "crc32c",
    "crc32c_combine",
    "dequantize_row",
    "pack_row",
    "unpack_row",
]
