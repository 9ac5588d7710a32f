"""How a budget of GPU memory becomes slots: arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass

from moet.cache.reference import default_staging
from moet.errors import ConfigError
from moet.kernels.paging.state import MAX_STAGING, MAX_WAVES

MIN_SLOTS = 3   # one for the working set, two in staging, as in RAM


@dataclass(frozen=True)
class ClassNeeds:
    """slot_bytes, rows: of the class. experts: of its largest layer. decode_rows: distinct rows that a layer of a decode step can need at once. token_rows: rows that one
    token needs in all its layers together."""

    slot_bytes: int
    rows: int
    experts: int
    decode_rows: int
    token_rows: int

    @property
    def smallest(self) -> "ClassSlots":
        """Below this the waves of a layer would not fit a plan. Never more than a slot for every row."""
        staging = max(2, -(-self.decode_rows // MAX_WAVES))
        paged = ClassSlots(max(MIN_SLOTS, staging + 1), staging, -(-self.experts // MAX_WAVES))
        return paged if paged.total < self.rows else ClassSlots(self.rows, 0, 0)


@dataclass(frozen=True)
class ClassSlots:
    """slots, staging of them, and the rows of one half of the ring behind them (0: every row has a slot)."""

    slots: int
    staging: int
    ring: int

    @property
    def total(self) -> int:
        """Slots that memory is needed for."""
        return self.slots + 2 * self.ring

    def waves(self, rows: int) -> int:
        """Most waves of a layer that needs `rows` distinct rows: a staging slot serves one row a wave."""
        return -(-rows // self.staging) if self.staging else 1


def minimum_bytes(classes: Sequence[ClassNeeds]) -> int:
    return sum(c.slot_bytes * c.smallest.total for c in classes)


def split(classes: Sequence[ClassNeeds], budget_bytes: int, ring_rows: int) -> list[ClassSlots]:
    """Slots of each class within a budget (0: every row). Each gets its minimum, then the same share of its rows as the others.

    A sixteenth of the slots, at most ring_rows and at most a layer's experts, is a ring's half. Of the others a quarter at most is staging: as many as a layer of a decode
    step can need, since every further wave is two launches, and half of what a token needs in a step, so that what one token missed is still there for the next one
    (docs/decisions/006-staging-on-a-gpu.md).
    Raises ConfigError with the bytes needed.
    """
    everything = sum(c.slot_bytes * c.rows for c in classes)
    if budget_bytes == 0 or budget_bytes >= everything:
        return [ClassSlots(c.rows, 0, 0) for c in classes]
    least = minimum_bytes(classes)
    if budget_bytes < least:
        raise ConfigError(f"GPU memory for experts: expected at least {least} bytes, found {budget_bytes}. Raise gpu_gib")
    share = (budget_bytes - least) / (everything - least)
    out = []
    for c in classes:
        low = c.smallest
        total = low.total + int(share * (c.rows - low.total))
        if low.ring == 0 or total >= c.rows:
            out.append(ClassSlots(c.rows, 0, 0))
            continue
        ring = max(low.ring, min(ring_rows, c.experts, total // 16))
        slots = total - 2 * ring
        wanted = max(default_staging(slots, c.rows), min(max(c.decode_rows, c.token_rows // 2), slots // 4))
        staging = min(slots - 1, MAX_STAGING, max(low.staging, wanted))
        out.append(ClassSlots(slots, staging, ring))
    return out
