"""`moet verify`: reads every byte of a pack once and compares it with moet.json; several files and rows at a
time."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from moet.errors import PackError
from moet.layout import RowGeometry, check_row, crc32c
from moet.pack import durable
from moet.pack import journal as journals
from moet.pack import manifest as manifests
from moet.pack.faults import Fault, Verdict
from moet.pack.manifest import Layer, Manifest, RowFile
from moet.pack.progress import Progress
from moet.pack.reader import geometry

PIECE = 4 << 20
NAMED_PARTS = 4
"""Parts of a damaged row that a message names."""

Task = Callable[[], tuple[list[Fault], int]]


def verify(root: Path, *, workers: int | None = None, progress: Progress | None = None) -> Verdict:
    """Checks all digests, headers, row checksums, and that nothing is missing. Raises PackError only if
    there is no pack of this format at all, or an unfinished one."""
    started = time.monotonic()
    root, progress = Path(root), progress or Progress()
    try:
        manifest = manifests.read(root)
    except PackError as e:
        lost = not (root / manifests.NAME).exists()
        if lost and not (
            any(root.glob("experts/base-*.safetensors")) and not (root / journals.NAME).exists()
        ):
            raise
        if not lost and _other_version(root):
            raise
        return Verdict((Fault("manifest", manifests.NAME, str(e)),), (), 0, time.monotonic() - started)
    faults: list[Fault] = []
    total = sum(f.bytes for f in manifest.files.values()) + sum(
        rows.bytes for _, rows, _ in row_files(manifest)
    )
    progress.start(total, 0)
    done = 0
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        for found, count in pool.map(lambda task: task(), _tasks(root, manifest)):
            faults += found
            done += count
            progress.advance(count)
    return Verdict(tuple(faults), tuple(_unknown(root, manifest)), done, time.monotonic() - started)


def row_files(manifest: Manifest) -> Iterator[tuple[Layer, RowFile, str]]:
    for layer in manifest.layers:
        yield layer, layer.base, "base"
        if layer.native:
            yield layer, layer.native, "native"


def check_file(root: Path, name: str, manifest: Manifest) -> tuple[list[Fault], int]:
    """A file that is not rows: size and blake3."""
    wanted = manifest.files[name]
    digest, size = blake3(), 0
    try:
        with open(root / name, "rb", buffering=0) as file:
            buffer = memoryview(_buffer(PIECE))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
    except OSError as e:
        return [Fault("file", name, f"expected {wanted.bytes} bytes, found: {e.strerror}")], 0
    if size != wanted.bytes:
        return [Fault("file", name, f"expected {wanted.bytes} bytes, found {size}")], size
    if digest.hexdigest() != wanted.blake3:
        return [Fault("file", name, f"expected blake3 {wanted.blake3}, found {digest.hexdigest()}")], size
    return [], size


def check_header(root: Path, layer: Layer, rows: RowFile, kind: str) -> tuple[list[Fault], int]:
    """Presence, size and header of a row file."""
    try:
        with open(root / rows.file, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(rows.data_offset)
    except OSError as e:
        return [
            Fault(
                "row file",
                rows.file,
                f"expected {rows.bytes} bytes, found: {e.strerror}",
                layer.index,
                rows=kind,
            )
        ], 0
    if size != rows.bytes:
        return [
            Fault("row file", rows.file, f"expected {rows.bytes} bytes, found {size}", layer.index, rows=kind)
        ], len(head)
    if (found := blake3(head).hexdigest()) != rows.header:
        return [
            Fault(
                "header",
                rows.file,
                f"header: expected blake3 {rows.header}, found {found}",
                layer.index,
                rows=kind,
            )
        ], len(head)
    return [], len(head)


def check_one_row(
    root: Path, layer: Layer, rows: RowFile, kind: str, expert: int, g: RowGeometry
) -> tuple[list[Fault], int]:
    """One row against its checksum. A row that the file does not reach is the file's fault, found by
    check_header, but named here too."""
    buffer = _buffer(rows.row_bytes)
    count = 0
    try:
        fd = os.open(root / rows.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [], 0
    try:
        view = memoryview(buffer)
        while count < rows.row_bytes and (
            got := os.preadv(fd, [view[count:]], rows.data_offset + expert * rows.row_bytes + count)
        ):
            count += got
    except OSError as e:
        return [Fault("row", rows.file, f"reading failed: {e.strerror}", layer.index, expert, kind)], count
    finally:
        os.close(fd)
    if count < rows.row_bytes:
        return [
            Fault(
                "row", rows.file, f"expected {rows.row_bytes} bytes, found {count}", layer.index, expert, kind
            )
        ], count
    found = f"{crc32c(buffer):08x}"
    if found == rows.rows[expert]:
        return [], count
    parts = check_row(g, buffer)
    where = ", ".join(parts[:NAMED_PARTS]) + (
        f" and {len(parts) - NAMED_PARTS} more" if len(parts) > NAMED_PARTS else ""
    )
    where = where or "its own checksums hold: a row from elsewhere"
    text = f"expected crc32c {rows.rows[expert]}, found {found} ({where})"
    return [Fault("row", rows.file, text, layer.index, expert, kind)], count


def _tasks(root: Path, manifest: Manifest) -> Iterator[Task]:
    for name in manifest.files:
        yield lambda name=name: check_file(root, name, manifest)
    for layer, rows, kind in row_files(manifest):
        g = geometry(manifest, layer, rows.format)
        yield lambda layer=layer, rows=rows, kind=kind: check_header(root, layer, rows, kind)
        for expert in range(layer.experts):
            yield lambda layer=layer, rows=rows, kind=kind, e=expert, g=g: check_one_row(
                root, layer, rows, kind, e, g
            )


def _unknown(root: Path, manifest: Manifest) -> Iterator[str]:
    """Files that are in the folder and not in the pack, hidden ones left out."""
    known = {manifests.NAME, *manifest.files, *(rows.file for _, rows, _ in row_files(manifest))}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(files):
            relative = Path(folder, name).relative_to(root).as_posix()
            if relative not in known and not name.startswith("."):
                yield relative
    if durable.work_dir(root).exists():
        yield f"{durable.WORK}/ (left by a run that was stopped at its very end; packing again removes it)"


def _other_version(root: Path) -> bool:
    try:
        data = (root / manifests.NAME).read_bytes()
        return manifests.version_of(data) != manifests.FORMAT_VERSION and not manifests.is_damaged_version(
            data
        )
    except (msgspec.DecodeError, OSError):
        return False


_local = threading.local()


def _buffer(size: int) -> np.ndarray:
    """This thread's buffer, at least as large as ever asked for."""
    if not hasattr(_local, "buffer") or _local.buffer.nbytes < size:
        _local.buffer = np.empty(size, np.uint8)
    return _local.buffer[:size]
