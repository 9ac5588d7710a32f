"""The bookkeeping of one slot class in plain Python: the specification. native/store/bookkeeping.cpp does the
same with heaps and lists, and is tested against this: same trace, same slots, same victims, same counters.
docs/pager.md says why the rules are these."""

from collections.abc import Sequence
from dataclasses import dataclass

HEAT_UNIT = 16  # of one touch: leaves four halvings before a single touch is forgotten
HEAT_MAX = 1 << 30
HYSTERESIS = HEAT_UNIT
AGE_TOUCHES_PER_ROW = 4


def default_staging(slots: int, rows: int) -> int:
    """Staging slots of a class: none where every row has a slot, else an eighth, at least 2 and at most 8
    (docs/decisions/001-cache-policy.md)."""
    return 0 if slots >= rows else min(max(slots // 8, 2), 8)


@dataclass(frozen=True)
class Step:
    """One row of the layer in flight, in the order in which rows are handed out.

    after: index of the step that must be done with the slot before this row is read into it, -1 for none;
    wave: how many such steps come before.
    evicted: the row that lost the slot, -1 for none. hit: the slot already belonged to the row.
    """

    row: int
    slot: int
    after: int
    wave: int
    evicted: int
    hit: bool


class Bookkeeping:
    """Slots 0..slots-1 for rows 0..rows-1. Each slot belongs to the working set or to staging; the number of
    each never changes.

    staging, hysteresis (heat), age_every (touches): None for the defaults.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        staging: int | None = None,
        hysteresis: int | None = None,
        age_every: int | None = None,
    ) -> None:
        if staging is None:
            staging = default_staging(slots, rows)
        staging = 0 if slots >= rows else min(max(staging, 1), slots - 1)
        self.hysteresis = HYSTERESIS if hysteresis is None else hysteresis
        self.age_every = AGE_TOUCHES_PER_ROW * rows if age_every is None else age_every
        self.row_of: list[int] = [-1] * slots
        self.slot_of: list[int] = [-1] * rows
        self.heat: list[int] = [0] * rows
        self.staging = list(range(slots - staging, slots))  # oldest first
        self.touches = self.evictions = self.admitted = 0

    def begin(self, rows: Sequence[int], scan: bool = False) -> list[Step]:
        """Plans the distinct rows of one layer: hits in the order given, then misses in the order given."""
        if not scan:
            self.touches += len(rows)
            if self.touches >= self.age_every:
                self.touches = 0
                self.heat = [h >> 1 for h in self.heat]
            for row in rows:
                if self.heat[row] < HEAT_MAX:
                    self.heat[row] += HEAT_UNIT
        steps = [Step(row, self.slot_of[row], -1, 0, -1, True) for row in rows if self.slot_of[row] >= 0]
        misses = [row for row in rows if self.slot_of[row] < 0]
        used = {step.slot: i for i, step in enumerate(steps)}  # slot -> its last step in this layer

        for step in list(steps):
            if step.slot in self.staging:
                self.staging.remove(step.slot)
                self.staging.append(step.slot)
                if not scan:
                    self._consider(step.row, used)
        for row in misses:
            slot = self.fill(row)
            after, wave, evicted = -1, 0, -1
            if slot < 0:
                slot = self.staging.pop(0)
                self.staging.append(slot)
                evicted = self.row_of[slot]
                if slot in used:
                    after = used[slot]
                    wave = steps[after].wave + 1
                self._assign(row, slot)
            used[slot] = len(steps)
            steps.append(Step(row, slot, after, wave, evicted, False))
            if slot in self.staging and not scan:
                self._consider(row, used)
        return steps

    def fill(self, row: int) -> int:
        """Gives the free slot of the working set with the lowest number to a row that has none; returns it,
        or -1 if there is none."""
        slot = next((s for s, owner in enumerate(self.row_of) if owner < 0 and s not in self.staging), -1)
        if slot >= 0:
            self._assign(row, slot)
        return slot

    def _assign(self, row: int, slot: int) -> None:
        if self.row_of[slot] >= 0:
            self.slot_of[self.row_of[slot]] = -1
            self.evictions += 1
        self.row_of[slot] = row
        self.slot_of[row] = slot

    def _consider(self, row: int, used: dict[int, int]) -> None:
        """Swaps the parts of a staged row's slot and the coldest slot that this layer does not use, if the
        row is hotter by more than the hysteresis."""
        candidates = [
            (self.heat[owner], s)
            for s, owner in enumerate(self.row_of)
            if owner >= 0 and s not in self.staging and s not in used
        ]
        if not candidates:
            return
        heat, victim = min(candidates)
        if self.heat[row] > heat + self.hysteresis:
            self.staging.remove(self.slot_of[row])
            self.staging.insert(0, victim)  # its row stays readable until the next miss takes the slot
            self.admitted += 1
