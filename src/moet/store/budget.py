"""How much RAM an arena may take: what the machine and its cgroup have left, less a reserve for everything else."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moet.errors import StoreError

GIB = 1 << 30
UNLIMITED = 1 << 60  # a cgroup v1 limit above this is none (9223372036854771712)


def size(count: int) -> str:
    """Bytes for people: `12.3 GiB`, `512 bytes`. Rounded down: what is said to be there can be asked for."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if abs(count) >= unit:
            return f"{10 * count // unit / 10:.1f} {name}"
    return f"{count} bytes"


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, read once. total, available: MemTotal and MemAvailable. cgroup_limit: the smallest one that this process is
    under, None without. cgroup_used: charged to that cgroup, less file pages that can be dropped. memlock: RLIMIT_MEMLOCK, None
    without."""

    total: int
    available: int
    cgroup_limit: int | None = None
    cgroup_used: int = 0
    memlock: int | None = None

    @classmethod
    def read(cls, root: Path = Path("/")) -> Self:
        """From /proc and /sys below `root`."""
        memory = _fields(root / "proc/meminfo", 1024)
        limit, used = _cgroup(root)
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            memory.get("MemTotal", 0),
            memory.get("MemAvailable", 0),
            limit,
            used,
            None if soft == resource.RLIM_INFINITY else soft,
        )

    @property
    def free(self) -> int:
        """What can be had at most. A cgroup's limit counts alone where it is above MemTotal: on some virtual machines (gVisor, memory
        that is plugged in on demand) MemTotal starts small and grows with use, and only the limit says what will be there."""
        if self.cgroup_limit is None:
            return max(self.available, 0)
        left = max(self.cgroup_limit - self.cgroup_used, 0)
        return left if self.cgroup_limit > self.total else min(left, self.available)

    @property
    def sure(self) -> int:
        """What is there now, whatever a limit promises."""
        return max(min(self.free, self.available), 0)

    def __str__(self) -> str:
        limit = (
            "no cgroup limit"
            if self.cgroup_limit is None
            else (f"{size(self.cgroup_used)} used of a cgroup limit of {size(self.cgroup_limit)}")
        )
        return f"{size(self.available)} of {size(self.total)} available, {limit}"


@dataclass(frozen=True)
class Budget:
    """ram_bytes: for the arena of one rank. why: one line for people that says what decided."""

    ram_bytes: int
    why: str


def reserve(machine: Machine) -> int:
    """Left to everything else of the machine: 2 GiB, or a twentieth of it."""
    return max(2 * GIB, (machine.cgroup_limit or machine.total) // 20)


def arena_budget(machine: Machine, everything: int, wanted: int | None = None, ranks: int = 1) -> Budget:
    """What the arena of one of `ranks` ranks of this machine may take, in bytes.

    everything: room for all rows of the rank: more is never taken. wanted: None for `auto`, which takes what is there now less a
    reserve (`reserve`); a number is taken as it is, if the machine can give it without a reserve. Raises StoreError if it cannot, or
    if nothing is left for `auto`.

    RLIMIT_MEMLOCK bounds nothing here: NVIDIA's driver pins pages without charging them to it. Where registering fails all the same,
    the error names it.
    """
    if wanted is not None:
        if wanted * ranks > machine.free:
            raise StoreError(
                f"RAM budget: expected at most {size(machine.free // ranks)} for each of {ranks} rank(s), found {size(wanted)} "
                f"({machine}). Lower the budget, or use `auto`"
            )
        return Budget(min(wanted, everything), f"{size(min(wanted, everything))} of RAM, as configured")
    kept = reserve(machine)
    share = (machine.sure - kept) // ranks
    if share <= 0:
        raise StoreError(
            f"RAM budget `auto`: expected more than the {size(kept)} that are kept for the rest of the machine, found {machine}. "
            "Free memory, raise the cgroup's limit, or name a budget"
        )
    if share >= everything:
        return Budget(everything, f"{size(everything)} of RAM: every row")
    why = f"{size(share)} of RAM for {size(everything)} of rows: {machine}, {size(kept)} kept for the rest, {ranks} rank(s)"
    if machine.free > machine.sure:
        why += (
            f". The cgroup's limit would allow {size((machine.free - kept) // ranks)}: name a budget if this machine's memory grows "
            "as it is used"
        )
    return Budget(share, why)


def _fields(path: Path, unit: int) -> dict[str, int]:
    """`name value` or `name: value kB` lines."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {
        words[0].rstrip(":"): int(words[1]) * unit
        for words in map(str.split, lines)
        if len(words) > 1 and words[1].isdigit()
    }


def _number(path: Path) -> int | None:
    """A file with one number; None if it is missing or says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup(root: Path) -> tuple[int | None, int]:
    """(limit, used) of the memory cgroup with the least left, of this process's own and those above it; both versions. A container
    may see its own group as the root of the mount, so a path that is not there is looked for there."""
    best: tuple[int | None, int] = (None, 0)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return best
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = (
                root / "sys/fs/cgroup",
                ("memory.max", "memory.current", "inactive_file", "active_file"),
            )
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents][: len(group.relative_to(mount).parts) + 1]:
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is None or used is None or limit >= UNLIMITED:
                continue
            stat = _fields(folder / "memory.stat", 1)
            used -= min(used, stat.get(names[2], 0) + stat.get(names[3], 0))
            if best[0] is None or limit - used < best[0] - best[1]:
                best = (limit, used)
    return best
