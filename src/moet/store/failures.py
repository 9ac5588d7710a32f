"""The words in which ranks count the rows that could not be read: a device counts its own up before a step's output exists, and
every rank reads all of them with the tokens."""

import ctypes
import mmap
import os
from pathlib import Path

from moet.errors import StoreError

STRIDE = 64  # bytes from one rank's word to the next: a cache line each
PAGE = 4096


def shared_page(path: Path | str, length: int) -> mmap.mmap:
    """Maps a file that whoever comes first makes. Its blocks are there afterwards: on a full memory file system a file's length can be set, and the first write
    to the mapping is a SIGBUS. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, length)  # no change where another process was first
        return mmap.mmap(file, length)
    finally:
        os.close(file)


class FailureWords:
    """`world` little-endian uint32 words, 64 bytes apart. This rank's begins at 0; others count on their own.

    path: a file that all ranks of the machine share, made if missing; on a memory file system (/dev/shm), since
    memory of a file on a disk cannot be pinned. None: private memory. Raises StoreError if the file cannot be made.
    """

    def __init__(self, path: Path | str | None, rank: int, world: int) -> None:
        self.world = world
        self.bytes = -(-world * STRIDE // PAGE) * PAGE
        try:
            if path is None:
                self._map = mmap.mmap(-1, self.bytes)
            else:
                self._map = shared_page(path, self.bytes)
        except OSError as e:
            raise StoreError(
                f"failures file {path}: expected a file of {self.bytes} bytes that can be written, found: {e.strerror}. "
                "Name one on a memory file system, /dev/shm, and make room there (containers: --shm-size)"
            ) from e
        self._words = (ctypes.c_uint32 * (self.bytes // 4)).from_buffer(self._map)
        self.start = ctypes.addressof(self._words)
        self.address = self.start + rank * STRIDE
        self._words[rank * STRIDE // 4] = 0

    def counts(self) -> tuple[int, ...]:
        """Rows that failed so far, of each rank, mod 2^32. A device's count is here before the output of its step."""
        return tuple(self._words[r * STRIDE // 4] for r in range(self.world))

    def close(self) -> None:
        """Unmaps the words. Twice is fine."""
        if not self._map.closed:
            del self._words
            self._map.close()
