"""Reads the counters of a pager, this process's or another's: the block of little-endian uint64 words that
native/store/counters.h defines."""

import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from moet.errors import StoreError

MAGIC = b"MOETCNT1"
LATENCY_BUCKETS = 32


@dataclass(frozen=True)
class Counters:
    """hits + misses: rows asked for (distinct experts of a layer); scan_*: the part of them that prefills
    asked for. layers: layers begun.
    waves: waves beyond a layer's first. wait_us: microseconds in which the model waited for rows.
    rows_*, bytes_*, reads, short_reads: what was read from files with O_DIRECT or through the page cache, in
    how many preads.
    evictions: rows that lost their slot. admitted: rows that moved from staging to the working set.
    arena_bytes, arena_slots, slots_valid, slots_pinned: the arena now. rows_total, bytes_total: slots and
    bytes that all rows would take.
    latency: 32 counts, bucket b = rows that were readable within [2^b, 2^(b+1)) microseconds of the first
    pread of the row (bucket 0 from 0).
    """

    hits: int
    misses: int
    scan_hits: int
    scan_misses: int
    evictions: int
    admitted: int
    waves: int
    layers: int
    wait_us: int
    rows_direct: int
    rows_buffered: int
    bytes_direct: int
    bytes_buffered: int
    reads: int
    short_reads: int
    checksum_failures: int
    io_errors: int
    rows_preheated: int
    rows_put: int
    arena_bytes: int
    arena_slots: int
    slots_valid: int
    slots_pinned: int
    rows_total: int
    bytes_total: int
    files_direct: int
    files_buffered: int
    io_threads: int
    latency: tuple[int, ...]

    @property
    def bytes_read(self) -> int:
        return self.bytes_direct + self.bytes_buffered

    @property
    def hit_rate(self) -> float:
        """Of all rows asked for; 1.0 if none was."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0

    def latency_us(self, fraction: float) -> float:
        """Upper bound in microseconds of the `fraction` quantile of row latency (the bucket's upper edge);
        0.0 if nothing was read."""
        wanted, seen = fraction * sum(self.latency), 0
        for bucket, count in enumerate(self.latency):
            seen += count
            if count and seen >= wanted:
                return float(2 << bucket)
        return 0.0

    def as_dict(self) -> dict[str, int | tuple[int, ...]]:
        return asdict(self)

    @classmethod
    def from_bytes(cls, block: bytes, name: str = "counters") -> Self:
        """Raises StoreError if the block is not one of this version."""
        count = len(NAMES) + LATENCY_BUCKETS
        if len(block) < BLOCK_BYTES or block[:8] != MAGIC or struct.unpack_from("<Q", block, 8)[0] != count:
            found = f"{block[:16].hex() or 'nothing'} in {len(block)} bytes"
            raise StoreError(
                f"{name}: expected {MAGIC.decode()} and {count} words, found {found}. "
                "Read it with the moet version that wrote it"
            )
        words = struct.unpack_from(f"<{count}Q", block, 16)
        return cls(*words[: len(NAMES)], latency=words[len(NAMES) :])


NAMES = tuple(f.name for f in fields(Counters) if f.name != "latency")
BLOCK_BYTES = 8 * (2 + len(NAMES) + LATENCY_BUCKETS)


def read(path: Path | str) -> Counters:
    """The counters that a pager shares in `path` (its `counters_path`), now. The words are read one by one
    while they change: each is right, their sum need not be. Raises StoreError if the file is missing or of
    another version."""
    try:
        block = Path(path).read_bytes()
    except OSError as e:
        raise StoreError(
            f"counters file {path}: expected the file of a running pager, found: {e.strerror}"
        ) from e
    return Counters.from_bytes(block, f"counters file {path}")
