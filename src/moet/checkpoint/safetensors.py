"""A strict reader of safetensors headers: what is in a file, and where. Nothing is mapped and no tensor data
is read.

Format (safetensors README, "Format"): 8 bytes little-endian length N, N bytes of JSON, then the data. The
JSON maps each name to dtype, shape
and data_offsets relative to the data; offsets leave no holes, and `__metadata__` may hold strings.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.errors import CheckpointError

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element of each dtype that safetensors knows."""

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit (MAX_HEADER_SIZE)."""

MAX_DIMENSIONS = 64
"""PyTorch's and NumPy's limit."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place. dtype: safetensors' spelling; file: the shard; offset: bytes from the start of the
    file; nbytes: its size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a safetensors file, ascending by offset. Raises CheckpointError naming the file and the
    tensor if the file is not exactly
    header plus data, if a name comes twice, or if a dtype, shape or offset is wrong."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise _broken(path, "8 bytes of header length", f"{len(head)} bytes in all")
            length = int.from_bytes(head, "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _broken(
                    path,
                    f"a header of 2 to {min(MAX_HEADER_BYTES, size - 8)} bytes (the file has {size})",
                    f"length {length}",
                )
            raw = file.read(length)
    except OSError as e:
        raise CheckpointError(
            f"{path}: expected a readable safetensors file, found: {e.strerror or e}"
        ) from e
    return _tensors(path, _parse(path, raw), 8 + length, size)


def _broken(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {expected}, found {found}. The file is damaged or incomplete: download it again."
    )


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(..., object_pairs_hook=)`: raises ValueError if a key comes twice (Python would keep
    the last one)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}")
    return result


def parse_json(raw: bytes, unique: bool = False) -> Any:
    """JSON in UTF-8. Raises ValueError or RecursionError, also for half a surrogate pair: nothing can write
    one again."""
    value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys if unique else None)
    if b"\\u" in raw:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = parse_json(raw, unique=True)
    except (ValueError, RecursionError) as e:
        raise _broken(path, "a JSON object as header, every name once", f"{e}") from e
    if not isinstance(header, dict) or raw[:1] != b"{":
        raise _broken(path, "a JSON object as header, from its first byte on", f"{raw[:20]!r}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "__metadata__ to map strings to strings", repr(metadata)[:100])
    return header


def _tensors(path: Path, header: dict[str, Any], data: int, size: int) -> dict[str, TensorInfo]:
    infos = sorted(
        (_tensor(path, name, entry, data) for name, entry in header.items()),
        key=lambda t: (t.offset, t.nbytes),
    )
    position = data
    for info in infos:
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a hole before it"
            raise _broken(
                path, f"tensor {info.name} to start at byte {position}", f"byte {info.offset}: it {kind}"
            )
        position += info.nbytes
    if position != size:
        raise _broken(path, f"{position} bytes (header and {len(infos)} tensors)", f"{size} bytes")
    return {info.name: info for info in infos}


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"tensor {name} to have dtype, shape and data_offsets", repr(entry)[:100])
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{path}, tensor {name}, dtype: expected one of {', '.join(DTYPE_BITS)}, found {dtype!r:.100}"
        )
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        expected = f"tensor {name}, shape: a list of up to {MAX_DIMENSIONS} integers >= 0"
        raise _broken(path, expected, repr(shape)[:100])
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"tensor {name}, data_offsets: two ascending integers", repr(offsets)[:100])
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    nbytes = offsets[1] - offsets[0]
    if bits != nbytes * 8:
        raise _broken(path, f"tensor {name}, {dtype} {shape}: {bits / 8:g} bytes", f"{nbytes}")
    return TensorInfo(name, dtype, tuple(shape), path, data + offsets[0], nbytes)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in values
    )
