"""Settings that more than one room reads: frozen, checked once at construction, defaults written here only."""

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from moet.errors import ConfigError

GIB = 1 << 30

Precision = Literal["base", "native"]
Activations = Literal["int24", "fp32", "int16", "int8"]  # moet.kernels.ACTIVATIONS


@dataclass(frozen=True)
class MoetConfig:
    """What `--additional-config '{"moet": {...}}'` may say.

    precision: which rows the experts are read from: `base` (2 bits) or `native` (the checkpoint's own bytes).
    ram_gib: budget of the arenas of all ranks together, in GiB. ram_percent: the same as a percentage of the experts' bytes at that precision. Neither: all rows.
    activations: number format of the activations inside the expert MLP on a CPU, for 2- and 4-bit rows (others: fp32). int24: exact sums of 24-bit integers per
      32 columns, as accurate as fp32; int16, int8: faster and coarser (docs/kernels-cpu.md).
    io_threads: threads that read rows; direct_io: bypass the page cache where the file system allows it.
    preheat: fill the arena at start with the rows that were hottest last time.
    scan_tokens: a step in which one request has more new tokens than this is a scan: its rows do not evict those that decoding uses.
    heat_dir: folder where the heat of a model's experts is kept between runs; empty: ~/.cache/moet/heat.
    run_dir: folder for the counters that /metrics shows; empty: one is made under the temporary folder and removed at the end.
    """

    precision: Precision = "base"
    ram_gib: float = 0.0
    ram_percent: float = 0.0
    activations: Activations = "int24"
    io_threads: int = 8
    direct_io: bool = True
    preheat: bool = True
    scan_tokens: int = 16
    heat_dir: str = ""
    run_dir: str = ""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(f"moet.precision: expected one of {get_args(Precision)}, found {self.precision!r}")
        if self.activations not in get_args(Activations):
            raise ConfigError(f"moet.activations: expected one of {get_args(Activations)}, found {self.activations!r}")
        if isinstance(self.ram_gib, bool) or not isinstance(self.ram_gib, int | float) or not 0 <= self.ram_gib < 1 << 20:
            raise ConfigError(f"moet.ram_gib: expected GiB as a number >= 0 (0: all rows), found {self.ram_gib!r}")
        if isinstance(self.ram_percent, bool) or not isinstance(self.ram_percent, int | float) or not 0 <= self.ram_percent <= 100:
            raise ConfigError(f"moet.ram_percent: expected 0 to 100 (0: not set), found {self.ram_percent!r}")
        if self.ram_gib and self.ram_percent:
            raise ConfigError(f"moet.ram_gib and moet.ram_percent: expected one of them, found {self.ram_gib} and {self.ram_percent}")
        if isinstance(self.scan_tokens, bool) or not isinstance(self.scan_tokens, int) or self.scan_tokens < 1:
            raise ConfigError(f"moet.scan_tokens: expected a number of tokens >= 1, found {self.scan_tokens!r}")
        if not isinstance(self.io_threads, int) or not 1 <= self.io_threads <= 256:
            raise ConfigError(f"moet.io_threads: expected 1 to 256, found {self.io_threads!r}")
        for name in ("direct_io", "preheat"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"moet.{name}: expected true or false, found {getattr(self, name)!r}")
        for name in ("heat_dir", "run_dir"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"moet.{name}: expected a path, found {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises ConfigError that lists the known names if one is unknown."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"moet.{name}: unknown setting. Known: {', '.join(known)}")
        return cls(**values)

    def budget_bytes(self, all_rows: int) -> int:
        """Of all ranks together, where all rows at this precision take `all_rows` bytes; 0 if they may all stay."""
        if self.ram_percent:
            return int(all_rows * self.ram_percent / 100) if self.ram_percent < 100 else 0
        budget = int(self.ram_gib * GIB)
        return budget if budget < all_rows else 0
