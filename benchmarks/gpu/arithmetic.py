"""What the GPU benchmarks compute from what they measured: bounds, shares, claims. No GPU and no clock in here."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from record import Claim


@dataclass(frozen=True)
class Samples:
    """Steps of one configuration: seconds, rows missed and bytes moved of each. `routing`: trace or router."""

    coverage: float
    tokens: int
    routing: str
    seconds: tuple[float, ...]
    misses: tuple[int, ...]
    bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.misses) == len(self.bytes) or not self.seconds:
            raise ValueError(f"samples: expected equally many of all, found {len(self.seconds)}, {len(self.misses)}, {len(self.bytes)}")

    @property
    def name(self) -> str:
        return f"{self.routing} x{self.tokens} {100 * self.coverage:g} %"


def bounds(steps: Samples, resident_s: float, bytes_per_s: float) -> list[float]:
    """Seconds of each step if nothing overlapped: the resident step, then its own missed bytes at the link's rate."""
    return [resident_s + moved / bytes_per_s for moved in steps.bytes]


def over_bound(steps: Samples, resident_s: float, bytes_per_s: float) -> float:
    """Median over steps of seconds / bound."""
    return statistics.median(s / b for s, b in zip(steps.seconds, bounds(steps, resident_s, bytes_per_s), strict=True))


def over_bound_total(steps: Samples, resident_s: float, bytes_per_s: float) -> float:
    """All seconds / all bounds: what a long run sees, slow steps included."""
    return sum(steps.seconds) / sum(bounds(steps, resident_s, bytes_per_s))


def hidden(steps: Samples, resident_s: float, bytes_per_s: float) -> float | None:
    """Part of the transfer's time (bytes at the link's rate) that the step did not become longer by; below 0 if it became longer than that. None: nothing moved."""
    transfer = sum(steps.bytes) / bytes_per_s
    return 1 - (sum(steps.seconds) - resident_s * len(steps.seconds)) / transfer if transfer else None


def trend(values: Sequence[float]) -> float | None:
    """Mean of the second half over that of the first: near 1 once a cache is in its steady state. None if nothing happened in the first."""
    half = len(values) // 2
    first, second = sum(values[:half]), sum(values[len(values) - half :])
    return second / first if first else None


def summary(steps: Samples, resident_s: float, bytes_per_s: float) -> dict[str, float | None]:
    median_s = statistics.median(steps.seconds)
    return {
        "step_ms": 1e3 * median_s, "tok_per_s": steps.tokens * len(steps.seconds) / sum(steps.seconds), "missed_rows": statistics.mean(steps.misses),
        "missed_mb": statistics.mean(steps.bytes) / 1e6, "misses_trend": trend(steps.misses), "over_bound": over_bound(steps, resident_s, bytes_per_s),
        "over_bound_total": over_bound_total(steps, resident_s, bytes_per_s), "hidden": hidden(steps, resident_s, bytes_per_s),
        "link_gb_per_s": sum(steps.bytes) / sum(steps.seconds) / 1e9,
    }  # fmt: skip


def rounded(values: Mapping[str, float | None], digits: int = 4) -> dict[str, float | None]:
    return {k: None if v is None else float(f"{v:.{digits}g}") for k, v in values.items()}


def scale_claims(runs: Sequence[Samples], resident: Mapping[tuple[str, int], float], bytes_per_s: float) -> list[Claim]:
    """G2, one per configuration that has a resident step of the same routing and batch; coverage 1 is that step itself."""
    claims = []
    for steps in runs:
        if steps.coverage >= 1 or (steps.routing, steps.tokens) not in resident:
            continue
        value = over_bound(steps, resident[steps.routing, steps.tokens], bytes_per_s)
        what = f"V4-Flash's experts, {steps.name}: step / (resident step + missed bytes / link rate), median"
        claims.append(Claim("G2", what, round(value, 3), "x", 1.1, "<="))
    return claims


def replay_claims(paged: Sequence[Samples], replayed: Sequence[Samples]) -> list[Claim]:
    """G3: median replayed step / median paged step, where both ran the same configuration."""
    times = {(s.coverage, s.tokens, s.routing): statistics.median(s.seconds) for s in paged}
    claims = []
    for steps in replayed:
        ours = times.get((steps.coverage, steps.tokens, steps.routing))
        if ours is None:
            continue
        target = {"router": 2.0, "trace": 1.5}[steps.routing]
        what = f"V4-Flash's experts, {steps.name}: a replayed step / a paged one, medians"
        claims.append(Claim("G3", what, round(statistics.median(steps.seconds) / ours, 3), "x", target, ">="))
    return claims


def prefill_claim(seconds: float, resident_s: float, moved: int, bytes_per_s: float, tokens: int, coverage: float) -> Claim:
    """G5: the larger of GEMM time and transfer time, over what the call took."""
    bound = max(resident_s, moved / bytes_per_s)
    what = f"V4-Flash's experts, prefill of {tokens} tokens at {100 * coverage:g} % coverage: max(GEMM time, bytes / link rate) / time"
    return Claim("G5", what, round(bound / seconds, 3), "", 0.7, ">=")


def same_bits_claim(id: str, what: str, differ: int) -> Claim:
    return Claim(id, what, differ, "", 0, "==")


FILL = "start: fill, beside it kernels and slots"   # of the times in an NVMe result


def disk_bytes_per_s(result: Mapping[str, Any]) -> float:
    """The fastest that the disk was seen in a run: plain O_DIRECT reads before and after the steps, or the store's own fill of the arena."""
    plain = max(result["disk"]["read_gb_per_s"]) * 1e9
    return max(plain, filled_bytes(result) / result["times_s"][FILL])


def filled_bytes(result: Mapping[str, Any]) -> int:
    steps = result["samples"]["arena 27 %"]
    return result["filled_rows"] * sum(steps["bytes"]) // sum(steps["missed_rows"])


def nvme_claims(result: Mapping[str, Any]) -> list[Claim]:
    """G4: mean step / (mean all-RAM step + mean bytes read / disk rate); means, for most steps read little and a few read much. G6: the start. From a result file's raw samples."""
    paged, all_ram, rate = result["samples"]["arena 27 %"], result["samples"]["all in RAM"], disk_bytes_per_s(result)
    bound = statistics.mean(all_ram["seconds"]) + statistics.mean(paged["disk_bytes"]) / rate
    step = "30 layers, 27 % of the rows in RAM, 15 % on the GPU, the rest on NVMe: step / (all-RAM step + NVMe bytes / disk rate), means"
    start = "from opening the store to the end of preheat / reading the same bytes at the disk's rate"
    seconds = result["times_s"]["start"]
    return [
        Claim("G4", step, round(statistics.mean(paged["seconds"]) / bound, 3), "x", 1.1, "<="),
        Claim("G6", start, round(seconds / (filled_bytes(result) / rate), 3), "x", 1.25, "<="),
    ]
