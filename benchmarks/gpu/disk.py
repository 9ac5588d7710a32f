"""Row files of random experts on a disk, and what the disk gives O_DIRECT reads."""

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from rows import Shape, layers_of_rows

from moet.layout import crc32c
from moet.store import RowSource

CHUNK = 1 << 20
"""Of a read, as the store's."""
WRITE = 8 << 20
HEADER = 4096


def seal(shape: Shape, row: np.ndarray) -> None:
    """Writes a row's checksums."""
    g = shape.geometry
    checksums = row[g.crc_offset : g.crc_offset + 8 * g.tiles].view("<u4")
    for t in range(g.tiles):
        checksums[t] = crc32c(row[t * g.w13_tile_bytes : (t + 1) * g.w13_tile_bytes])
        checksums[g.tiles + t] = crc32c(row[g.w2_offset + t * g.w2_tile_bytes : g.w2_offset + (t + 1) * g.w2_tile_bytes])
    row[-4:] = np.array([crc32c(row[g.extras_offset : -4])], "<u4").view(np.uint8)


def write(shape: Shape, folder: Path, device: torch.device, threads: int, say: Callable[[str], None]) -> tuple[dict[int, RowSource], float]:
    """One file a layer, past the page cache; (sources, bytes a second of the writing alone)."""
    folder.mkdir(parents=True, exist_ok=True)
    sources, seconds, written = {}, 0.0, 0
    with ThreadPoolExecutor(threads) as pool:
        for layer, rows in layers_of_rows(shape, device):
            values = rows.numpy()
            list(pool.map(seal, repeat(shape), values))
            flat, path, start = values.reshape(-1), folder / f"rows-{layer:03d}", time.perf_counter()
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
            try:
                os.posix_fallocate(file, 0, HEADER + len(flat))
                pieces = range(0, len(flat), WRITE)
                list(pool.map(_write_all, repeat(file), [flat[at : at + WRITE] for at in pieces], [HEADER + at for at in pieces]))
                os.fsync(file)
            finally:
                os.close(file)
            seconds, written = seconds + time.perf_counter() - start, written + len(flat)
            sources[layer] = RowSource(shape.geometry, shape.experts, path, HEADER)
            say(f"layer {layer + 1} of {shape.layers} written, {written / seconds / 1e9:.2f} GB/s")
    return sources, written / seconds


def _write_all(file: int, data: np.ndarray, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done


def read_rate(sources: dict[int, RowSource], threads: int, seconds: float, seed: int) -> float:
    """Bytes a second that `threads` threads get with O_DIRECT reads of CHUNK bytes: random rows, each row's chunks in turn by all threads, as the store reads them."""
    files = [os.open(s.path, os.O_RDONLY | os.O_DIRECT) for s in sources.values()]
    row_bytes, experts = next(iter(sources.values())).geometry.row_bytes, next(iter(sources.values())).experts
    order = np.random.default_rng(seed).permutation(len(files) * experts)
    pieces = [(int(row), at) for row in order for at in range(0, row_bytes, CHUNK)]
    position, read, deadline = iter(pieces), [0] * threads, time.perf_counter() + seconds

    def work(thread: int) -> None:
        with mmap.mmap(-1, CHUNK) as buffer:   # page-aligned, as O_DIRECT asks
            while time.perf_counter() < deadline:
                piece = next(position, None)   # under the interpreter's lock
                if piece is None:
                    return
                row, at = piece
                size = min(CHUNK, row_bytes - at)
                view = memoryview(buffer)[:size]
                read[thread] += os.preadv(files[row // experts], [view], HEADER + row % experts * row_bytes + at)
                view.release()

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    took = time.perf_counter() - start
    for file in files:
        os.close(file)
    return sum(read) / took


def remove(sources: dict[int, RowSource]) -> None:
    for source in sources.values():
        source.path.unlink(missing_ok=True)
