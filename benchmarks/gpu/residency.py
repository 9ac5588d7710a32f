"""The replay baseline's cache: which rows have a slot. The host decides after a step, so a row that the step used must stay until the step is done."""

import numpy as np

from moet.cache.reference import AGE_TOUCHES_PER_ROW, HEAT_UNIT


class Residency:
    """The same heat as the pager's (16 a touch, halved after 4 touches a row); a missing row takes a free slot, else the coldest slot whose row this step does
    not use, the lowest number among equals. There is no staging: what a step used must not leave before its last run."""

    def __init__(self, rows: int, slots: int) -> None:
        self.slot_of = np.full(rows, -1, np.int32)
        self.row_of = np.full(slots, -1, np.int32)
        self.heat = np.zeros(rows, np.int64)
        self._used = np.zeros(rows, bool)   # by this step: pins
        self._touches = 0

    def begin(self) -> None:
        """A step begins: nothing is pinned."""
        self._used[:] = False

    def place(self, missing: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(slots, evicted): a slot for each of the distinct rows `missing`, and the rows that lost theirs. used: rows that the step has read so far.

        Raises ValueError if the step needs more rows than there are slots: replaying could not end."""
        self._used[used] = True
        self._used[missing] = True
        free = np.flatnonzero(self.row_of < 0)[: len(missing)]
        slots, evicted = free, np.empty(0, np.int32)
        if (short := len(missing) - len(free)) > 0:
            owned = np.flatnonzero(self.row_of >= 0)
            owned = owned[~self._used[self.row_of[owned]]]
            if len(owned) < short:
                raise ValueError(f"replay: expected at most {len(self.row_of)} rows in a step, found {short - len(owned)} more")
            coldest = owned[np.argsort(self.heat[self.row_of[owned]], kind="stable")[:short]]
            slots, evicted = np.concatenate([free, coldest]), self.row_of[coldest]
            self.slot_of[evicted] = -1
        self.row_of[slots] = missing
        self.slot_of[missing] = slots
        return slots, evicted

    def touch(self, rows: np.ndarray) -> None:
        """The step is done; `rows` are its distinct rows."""
        self._touches += len(rows)
        if self._touches >= AGE_TOUCHES_PER_ROW * len(self.heat):
            self._touches = 0
            self.heat >>= 1
        self.heat[rows] += HEAT_UNIT

    def preload(self, heat: np.ndarray) -> np.ndarray:
        """Rows for slots 0, 1, ..., the hottest; heat [rows] is the heat from now on."""
        self.heat[:] = heat
        rows = np.argsort(-self.heat, kind="stable")[: len(self.row_of)].astype(np.int32)
        self.row_of[: len(rows)], self.slot_of[rows] = rows, np.arange(len(rows), dtype=np.int32)
        return rows
