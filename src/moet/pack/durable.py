"""Files that are either whole or not there: a temporary file in DST/.moet, fsync, rename, fsync of the
folder."""

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from moet.errors import PackError

WORK = ".moet"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SYNC_FILE_RANGE_WRITE = 2


def work_dir(root: Path) -> Path:
    """Where an unfinished pack keeps its lock, its journal and its temporary files. Gone once the pack is
    finished."""
    return root / WORK


@contextlib.contextmanager
def explained(root: Path, doing: str) -> Iterator[None]:
    """Turns an OSError into a PackError that says what was being written and what to do."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            raise PackError(
                f"{root}: no space left while writing {doing} ({os.strerror(e.errno)}). "
                "Finished layers are kept: make room and run the same command again"
            ) from e
        where = f" ({e.filename2 or e.filename})" if e.filename else ""
        raise PackError(
            f"{root}: expected to be able to write {doing}, found: {e.strerror or e}{where}"
        ) from e


def sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Asks the kernel to start writing a range now, so that the fsync at the end of a layer is short and
    dirty pages stay few."""
    _sync_file_range()(fd, offset, length, SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range():
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return lambda *_: 0
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def pwrite_all(fd: int, data, offset: int) -> None:
    """All of `data` (contiguous) at `offset`: one pwrite may write less than it was given."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


class TempFile:
    """A file under construction. `commit` makes it appear under its name; leaving the `with` block without
    that removes it."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.path = work_dir(root) / ("tmp-" + name.replace("/", "-"))
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data, offset: int) -> None:
        """All of `data` at `offset`."""
        pwrite_all(self.fd, data, offset)

    def commit(self) -> None:
        os.fsync(self.fd)
        target = self.root / self.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.path, target)
        sync_dir(target.parent)
        if target.parent != self.root:
            sync_dir(self.root)

    def __enter__(self) -> "TempFile":
        return self

    def __exit__(self, *_) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)  # after commit it has another name


def write_whole(root: Path, name: str, data: bytes) -> None:
    with TempFile(root, name) as file:
        file.write(data, 0)
        file.commit()


def sweep(root: Path) -> int:
    """Removes the temporary files of a run that was killed; call it under the lock. Returns how many there
    were."""
    orphans = list(work_dir(root).glob("tmp-*"))
    for path in orphans:
        path.unlink()
    return len(orphans)
