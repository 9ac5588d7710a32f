"""Settings that more than one room reads: frozen, checked once at construction, defaults written here only."""

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from moet.errors import ConfigError

GIB = 1 << 30

Precision = Literal["base", "native"]
Activations = Literal["int24", "fp32", "int16", "int8"]  # moet.kernels.ACTIVATIONS
PrefillActivations = Literal["bf16", "mxfp8"]


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
    gpu_gib: memory for slots on each GPU, in GiB. gpu_percent: the same as a percentage of the bytes of the rows there. Neither: sized after the KV cache.
    fetch_blocks: thread blocks of a layer's first GEMM that copy missing rows. ring_rows: rows in each half of the ring that prefills
      stream through. wait_limit_s: a GPU that has seen no progress for this long gives a row up and fails the requests of the step. All three: CUDA only.
    prefill_activations: number format of the activations inside the expert MLP in prefills on a GPU. mxfp8: for cards with block-scaled tensor cores (RTX 50, RTX PRO
      Blackwell), faster there and coarser; elsewhere it is for tests.
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
    gpu_gib: float = 0.0
    gpu_percent: float = 0.0
    fetch_blocks: int = 8
    ring_rows: int = 32
    wait_limit_s: float = 30.0
    prefill_activations: PrefillActivations = "bf16"
    heat_dir: str = ""
    run_dir: str = ""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ConfigError(f"moet.precision: expected one of {get_args(Precision)}, found {self.precision!r}")
        if self.activations not in get_args(Activations):
            raise ConfigError(f"moet.activations: expected one of {get_args(Activations)}, found {self.activations!r}")
        if self.prefill_activations not in get_args(PrefillActivations):
            raise ConfigError(f"moet.prefill_activations: expected one of {get_args(PrefillActivations)}, found {self.prefill_activations!r}")
        for tier, rest in (("ram", "all rows"), ("gpu", "sized after the KV cache")):
            gib, percent = getattr(self, f"{tier}_gib"), getattr(self, f"{tier}_percent")
            if not _is_number(gib) or not 0 <= gib < 1 << 20:
                raise ConfigError(f"moet.{tier}_gib: expected GiB as a number >= 0 (0: {rest}), found {gib!r}")
            if not _is_number(percent) or not 0 <= percent <= 100:
                raise ConfigError(f"moet.{tier}_percent: expected 0 to 100 (0: not set), found {percent!r}")
            if gib and percent:
                raise ConfigError(f"moet.{tier}_gib and moet.{tier}_percent: expected one of them, found {gib} and {percent}")
        if isinstance(self.scan_tokens, bool) or not isinstance(self.scan_tokens, int) or self.scan_tokens < 1:
            raise ConfigError(f"moet.scan_tokens: expected a number of tokens >= 1, found {self.scan_tokens!r}")
        for name, most in (("io_threads", 256), ("fetch_blocks", 64), ("ring_rows", 1024)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"moet.{name}: expected 1 to {most}, found {value!r}")
        if not _is_number(self.wait_limit_s) or not 0.1 <= self.wait_limit_s <= 3600:
            raise ConfigError(f"moet.wait_limit_s: expected 0.1 to 3600 seconds, found {self.wait_limit_s!r}")
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

    def gpu_bytes(self, all_rows: int) -> int | None:
        """Of one GPU whose rows take `all_rows` bytes, at most that; None: sized after the KV cache."""
        if self.gpu_percent:
            return int(all_rows * self.gpu_percent / 100)
        return min(int(self.gpu_gib * GIB), all_rows) if self.gpu_gib else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
