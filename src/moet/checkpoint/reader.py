"""Reads byte ranges of shards with pread into memory that the caller owns. Mapping files would let their
pages count as this process's memory."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet.errors import CheckpointError

MAX_BUFFERS = 512
"""Buffers of one preadv; Linux allows 1024 (IOV_MAX)."""


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range of a file."""

    file: Path
    offset: int
    nbytes: int


class Reader:
    """Keeps one file descriptor per shard that is in use. Threads may share a reader."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """The bytes of each span, uint8, in one allocation, each starting at a multiple of 64. Neighbours in
        a file are read by one system call.

        Raises CheckpointError if a file ends early or cannot be read.
        """
        starts, total = [], 0
        for span in spans:
            starts.append(total)
            total += -(-span.nbytes // 64) * 64
        memory = np.empty(total + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :]
        parts = [memory[start : start + span.nbytes] for start, span in zip(starts, spans, strict=True)]
        order = sorted(range(len(spans)), key=lambda i: (str(spans[i].file), spans[i].offset))
        run: list[int] = []
        for i in order:
            if run and (len(run) == MAX_BUFFERS or not _adjacent(spans[run[-1]], spans[i])):
                self._fill(spans[run[0]], [parts[j] for j in run])
                run = []
            run.append(i)
        if run:
            self._fill(spans[run[0]], [parts[j] for j in run])
        return parts

    def _fill(self, first: Span, parts: list[np.ndarray]) -> None:
        fd, offset = self._open(first.file), first.offset
        views = [memoryview(part) for part in parts if part.nbytes]
        while views:
            try:
                n = os.preadv(fd, views, offset)
            except OSError as e:
                raise CheckpointError(f"{first.file}: reading at byte {offset} failed: {e.strerror}") from e
            if n == 0:
                raise CheckpointError(
                    f"{first.file}: expected at least {offset + sum(v.nbytes for v in views)} bytes, "
                    f"found {offset}. The file is truncated: download it again."
                )
            offset += n
            while views and n >= views[0].nbytes:
                n -= views.pop(0).nbytes
            if n:
                views[0] = views[0][n:]

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as e:
                    raise CheckpointError(f"{path}: expected a readable shard, found: {e.strerror}") from e
            return self._files[path]

    def close(self, path: Path | None = None) -> None:
        """Closes one file, or all: a deleted file's space is free only then."""
        with self._lock:
            for name in [path] if path else list(self._files):
                fd = self._files.pop(name, None)
                if fd is not None:
                    os.close(fd)

    def __del__(self) -> None:
        self.close()


def _adjacent(a: Span, b: Span) -> bool:
    return a.file == b.file and a.offset + a.nbytes == b.offset
