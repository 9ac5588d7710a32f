"""Will it fit: asked before the first byte is written, with native rows and what an earlier run already
wrote counted."""

import os
from dataclasses import dataclass
from pathlib import Path

from moet.errors import PackError

SLACK = 64 << 20
"""Small files, the journal and the file system's own records."""


@dataclass(frozen=True)
class Need:
    """Bytes of the finished pack by kind, and how many of them are there already. scratch: what its making takes beside
    them."""

    base: int
    native: int
    dense: int
    present: int
    scratch: int = 0

    @property
    def missing(self) -> int:
        left = max(0, self.base + self.native + self.dense - self.present)
        return left + self.scratch if left else 0


def gib(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB" if n >= 1 << 28 else f"{n / (1 << 20):.1f} MiB"


def check(root: Path, need: Need, freed: int = 0) -> None:
    """Raises PackError if the file system of `root` has fewer free bytes than are missing.

    freed: bytes that --consume gives back there; negative: what shards that are still to come take.
    """
    stat = os.statvfs(root)
    free = stat.f_bavail * stat.f_frsize
    wanted = need.missing + SLACK - freed if need.missing else 0
    if wanted > free:
        parts = f"base {gib(need.base)}, native {gib(need.native)}, dense {gib(need.dense)}"
        parts += f", calibration {gib(need.scratch)}" if need.scratch else ""
        ways = "Make room, choose another folder" + (", or pack with --no-native" if need.native else "")
        raise PackError(
            f"{root}: expected {gib(wanted)} of free space ({parts}; {gib(need.present)} already there), "
            f"found {gib(free)}. {ways}"
        )
