"""The safetensors file that holds the rows of one layer: one U8 tensor `rows` [experts, row_bytes], its data
on a 4096-byte boundary."""

import json
from pathlib import Path

from moet.errors import PackError

ALIGN = 4096
TENSOR = "rows"


def file_name(kind: str, layer: int) -> str:
    """`kind` is "base" or "native". Three digits, more where a model has more layers."""
    return f"experts/{kind}-{layer:03d}.safetensors"


def header(layer: int, format: str, experts: int, row_bytes: int) -> bytes:
    """All bytes before row 0: the 8-byte length, the JSON, and spaces up to a multiple of 4096 (safetensors'
    README allows trailing spaces)."""
    text = json.dumps({
        "__metadata__": {"moet": "1", "layer": str(layer), "row": format},
        TENSOR: {"dtype": "U8", "shape": [experts, row_bytes], "data_offsets": [0, experts * row_bytes]},
    }, separators=(",", ":")).encode()  # fmt: skip
    padded = -(-(8 + len(text)) // ALIGN) * ALIGN
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def format_of(path: Path) -> str:
    """The row format that the header names; "" if it names none."""
    with path.open("rb") as file:
        info = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return info.get("__metadata__", {}).get("row", "")


def read_header(path: Path) -> tuple[int, int, int]:
    """(data_offset, experts, row_bytes) of a row file. Raises PackError if it is not one or is not of the
    size that it says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 0 < length <= size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            info = json.loads(file.read(length))[TENSOR]
        experts, row_bytes = info["shape"]
        if (
            info["dtype"] != "U8"
            or info["data_offsets"] != [0, experts * row_bytes]
            or row_bytes % ALIGN
            or (8 + length) % ALIGN
        ):
            raise ValueError(f"tensor {info}")
        if size != 8 + length + experts * row_bytes:
            raise ValueError(f"{size} bytes instead of {8 + length + experts * row_bytes}")
    except OSError as e:
        raise PackError(f"{path}: expected a row file, found: {e.strerror}") from None
    except (ValueError, KeyError, TypeError) as e:
        raise PackError(
            f"{path}: expected one U8 tensor {TENSOR!r} of whole 4096-byte-aligned rows, found: {e}"
        ) from None
    return 8 + length, experts, row_bytes
