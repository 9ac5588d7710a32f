"""A GPU's slot tables, plan and control in host memory, for kernels that run in the emulator."""

import ctypes

import numpy as np

from moet.cache.reference import Bookkeeping, Step, default_staging
from moet.kernels.paging.state import (
    COUNTERS,
    RESOLVE_THREADS,
    WORKING,
    Absent,
    Control,
    LayerArgs,
    Plan,
    SlotClass,
)


class Memory:
    """One class of `layers` layers with `experts` each. Slots are empty; staging is what a Bookkeeping of the same arguments begins with."""

    def __init__(self, experts, layers, slots, staging=None, hysteresis=16, age_every=None, ring=0, slot_bytes=64, pairs=4096):
        rows = experts * layers
        staging = default_staging(slots, rows) if staging is None else staging
        staging = 0 if slots >= rows else min(max(staging, 1), slots - 1)
        self.experts, self.rows, self.slots, self.slot_bytes = experts, rows, slots, slot_bytes
        self.slot_of = np.full(rows, -1, np.int32)
        self.row_of = np.full(slots, -1, np.int32)
        self.heat = np.zeros(rows, np.uint32)
        self.valid = np.zeros(slots, np.uint32)
        self.stamp = np.full(slots, WORKING, np.int64)
        self.stamp[slots - staging :] = np.arange(staging)
        self.pool = np.zeros((slots + 2 * ring) * slot_bytes + 16, np.uint8)
        self.pool = self.pool[-self.pool.ctypes.data % 16 :][: (slots + 2 * ring) * slot_bytes]
        self.pairs = np.full(pairs, -1, np.int32)
        self.cls = SlotClass(
            rows=rows, slots=slots, staging=staging, ring=ring, hysteresis=hysteresis, age_every=4 * rows if age_every is None else age_every,
            slot_bytes=slot_bytes, newest=staging, oldest=-1, pool=self.pool.ctypes.data, slot_of=self.slot_of.ctypes.data,
            row_of=self.row_of.ctypes.data, heat=self.heat.ctypes.data, valid=self.valid.ctypes.data, stamp=self.stamp.ctypes.data,
        )  # fmt: skip
        self.control = Control(armed=1, limit_ns=5_000_000_000)
        self.failures = ctypes.c_uint32(0)
        self.control.failures = ctypes.addressof(self.failures)
        self.plan = Plan(pairs=self.pairs.ctypes.data)
        self.absent = [Absent(), Absent()]

    def layer_args(self, layer, ids, kv=None, begins_step=0):
        """ids int32 [tokens, top_k], kv int64 [tokens]; kept alive by the result."""
        ids = np.ascontiguousarray(ids, np.int32)
        kv = None if kv is None else np.ascontiguousarray(kv, np.int64)
        args = LayerArgs(
            slots=ctypes.addressof(self.cls), control=ctypes.addressof(self.control), plan=ctypes.addressof(self.plan), topk_ids=ids.ctypes.data,
            kv_slots=0 if kv is None else kv.ctypes.data, tokens=ids.shape[0], top_k=ids.shape[1], experts=self.experts, cls=0,
            first_row=layer * self.experts, begins_step=begins_step,
        )  # fmt: skip
        args.kept = (ids, kv)
        return args

    def resolve(self, module, layer, ids, kv=None, begins_step=0, threads=RESOLVE_THREADS):
        args = self.layer_args(layer, ids, kv, begins_step)
        module.launch("resolve", 1, threads, args)
        return args

    def counters(self):
        return dict(zip(COUNTERS, self.control.counter, strict=False))

    def steps(self):
        return list(self.plan.steps[: self.plan.count])

    def state(self):
        staged = self.stamp != WORKING
        order = np.flatnonzero(staged)
        return {
            "heat": self.heat.tolist(),
            "row_of": self.row_of.tolist(),
            "slot_of": self.slot_of.tolist(),
            "staging": order[np.argsort(self.stamp[order])].tolist(),
            "counts": [self.cls.evictions, self.cls.admitted, self.cls.touches],
        }


class Reference(Bookkeeping):
    """The specification, and what it does not have: a row whose slot is its own but whose bytes never came. It is a miss into that slot, and
    nobody's victim while its layer is in flight."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.broken: set[int] = set()

    def state(self):
        counts = [self.evictions, self.admitted, self.touches]
        return {"heat": self.heat, "row_of": self.row_of, "slot_of": self.slot_of, "staging": self.staging, "counts": counts}

    def begin(self, rows, scan=False):
        if not self.broken & set(rows):
            steps = super().begin(rows, scan)
            self.broken &= {r for r in self.row_of if r >= 0}
            return steps
        assert not scan
        self.touches += len(rows)
        if self.touches >= self.age_every:
            self.touches = 0
            self.heat = [h >> 1 for h in self.heat]
        for row in rows:
            self.heat[row] += 16
        layer = set(rows)
        hits = [r for r in rows if self.slot_of[r] >= 0 and r not in self.broken]
        steps = [Step(r, self.slot_of[r], -1, 0, -1, True) for r in hits]
        used: dict[int, int] = {}
        for i, step in enumerate(steps):
            used[step.slot] = i
        pinned = {s: -1 for s, r in enumerate(self.row_of) if r in layer}
        for step in list(steps):
            if step.slot in self.staging:
                self.staging.remove(step.slot)
                self.staging.append(step.slot)
                self._consider(step.row, {**pinned, **used})
        for row in (r for r in rows if r not in hits):
            slot, after, wave, evicted = self.slot_of[row], -1, 0, -1
            if slot >= 0:
                if slot in self.staging:
                    self.staging.remove(slot)
                    self.staging.append(slot)
            else:
                slot = self.fill(row)
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
            if slot in self.staging:
                self._consider(row, {**pinned, **used})
        self.broken -= layer
        self.broken &= {r for r in self.row_of if r >= 0}
        return steps
