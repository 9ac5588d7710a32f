"""Packs that `moet serve` made: one folder each, found again by what is in the checkpoint, removed when not used for longest.

    CACHE/packs/NAME-KEY/       a pack with base and native rows; NAME-KEY-base/ has base rows only
    CACHE/packs/NAME-KEY.lock   held (flock): exclusively while it is packed or removed, shared while it is served; its mtime is the last use
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from moet.checkpoint import Checkpoint
from moet.errors import ConfigError, PackError
from moet.pack import fingerprint

SAMPLES, SAMPLE_BYTES = 64, 4096


def default_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moet"


def local_key(folder: Path) -> str:
    """12 hex digits from the checkpoint's content: its config, its tensor names, and of each shard the size and 64 samples of 4 KiB, evenly
    spread. Reading all of a checkpoint at each start would take minutes; two that differ in none of a shard's samples are not told apart
    (`moet pack` never looks here). Raises CheckpointError if the folder is not a complete checkpoint."""
    checkpoint = Checkpoint.open(folder)
    digest = blake3(fingerprint.names(checkpoint.config, checkpoint.names).encode())
    for shard in checkpoint.shards:
        path = checkpoint.source.fetch(shard)
        size = path.stat().st_size
        digest.update(json.dumps([shard, size]).encode())
        with open(path, "rb", buffering=0) as file:
            for i in range(SAMPLES):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1)))
    return digest.hexdigest()[:12]


def hub_key(repo: str, commit: str) -> str:
    """A commit of the Hub names its content."""
    return blake3(json.dumps([repo, commit]).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Entry:
    name: str
    path: Path
    bytes: int
    used: float  # seconds since the epoch
    state: str  # "ready", "in use", "unfinished"


class PackCache:
    """The cache folder; made when first written to."""

    def __init__(self, root: Path) -> None:
        self.root = root / "packs"

    def path(self, name: str) -> Path:
        return self.root / name

    def has(self, name: str) -> bool:
        return (self.path(name) / "moet.json").is_file()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Alone with the pack; waits for another process that is packing it. Raises PackError if it is being served."""
        with self._lock(name, fcntl.LOCK_EX):
            yield

    def hold(self, name: str) -> int:
        """Marks the pack as used, now and until the process that inherits the returned descriptor (over exec, too) ends."""
        fd = self._acquire(name, fcntl.LOCK_SH)
        os.utime(fd)
        os.set_inheritable(fd, True)
        return fd

    def entries(self) -> list[Entry]:
        """Least recently used first."""
        if not self.root.is_dir():
            return []
        found = [self._entry(path) for path in self.root.iterdir() if path.is_dir()]
        return sorted(found, key=lambda e: (e.used, e.name))

    def remove(self, name: str) -> bool:
        """False if the pack is in use."""
        try:
            with self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(self.path(name))
                self._lock_path(name).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def prune(self, max_bytes: int, keep: str = "") -> list[Entry]:
        """Removes packs, least recently used first, until all together take at most max_bytes; not the ones in use, nor `keep`. Returns them."""
        entries = self.entries()
        total, removed = sum(e.bytes for e in entries), []
        for entry in entries:
            if total <= max_bytes:
                break
            if entry.name != keep and self.remove(entry.name):
                total -= entry.bytes
                removed.append(entry)
        return removed

    def _entry(self, path: Path) -> Entry:
        size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        lock = self._lock_path(path.name)
        used = lock.stat().st_mtime if lock.exists() else path.stat().st_mtime
        state = "ready" if self.has(path.name) else "unfinished"
        try:
            with self._lock(path.name, fcntl.LOCK_EX | fcntl.LOCK_NB, create=False):
                pass
        except BlockingIOError:
            state = "in use"
        except FileNotFoundError:
            pass
        return Entry(path.name, path, size, used, state)

    def _lock_path(self, name: str) -> Path:
        return self.root / f"{name}.lock"

    @contextlib.contextmanager
    def _lock(self, name: str, how: int, create: bool = True) -> Iterator[None]:
        fd = self._acquire(name, how, create)
        try:
            yield
        finally:
            os.close(fd)

    def _acquire(self, name: str, how: int, create: bool = True) -> int:
        """Raises BlockingIOError, or FileNotFoundError without `create`."""
        path = self._lock_path(name)
        if create:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise PackError(f"{self.root}: expected a folder for packs that can be written, found: {e.strerror}; use --cache-dir") from e
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
            try:
                fcntl.flock(fd, how)
                # Who removed the pack has unlinked this file: then the lock guards nothing, and a new file is the lock.
                if os.fstat(fd).st_ino == os.stat(path).st_ino:
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def parse_gib(text: str, what: str) -> int:
    """ "1.5" or "1.5GiB" -> bytes. Raises ConfigError."""
    number = text.strip().lower().removesuffix("gib").strip()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 20:
        raise ConfigError(f"{what}: expected GiB as a number from 0 on (as 12 or 12GiB), found {text!r}")
    return int(value * (1 << 30))
