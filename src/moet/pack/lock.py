"""One packer a folder: flock on DST/.moet/lock, which the kernel drops when its holder dies, however it
dies."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from moet.errors import PackError
from moet.pack.durable import work_dir


@contextlib.contextmanager
def hold(root: Path) -> Iterator[None]:
    """Holds the pack folder `root`; makes it if needed. Raises PackError naming the holder if another
    process has it."""
    folder = work_dir(root)
    try:
        if root.exists() and not root.is_dir():
            raise PackError(f"{root}: expected a folder to write the pack to, found a file")
        fd = _acquire(folder / "lock", root)
    except OSError as e:
        raise PackError(
            f"{root}: expected a folder that can be written, found: {e.strerror} ({e.filename or folder})"
        ) from e
    try:
        yield
    finally:
        os.close(fd)


def remove(root: Path) -> None:
    """Removes the work folder of a finished pack; call it while holding the lock."""
    folder = work_dir(root)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    (folder / "lock").unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        # else another packer has taken the lock since: the folder is its own to remove


def _acquire(path: Path, root: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # a holder finished, and removed the folder, between the two lines
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            raise PackError(
                f"{root}: another packer is writing here ({holder}); wait for it, or choose another folder"
            ) from None
        # A holder that finished has unlinked the file: then this lock guards nothing, and a new file is the
        # lock.
        try:
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _holder(fd: int) -> str:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError):
        return "a process that has just started"
