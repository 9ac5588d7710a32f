"""The pager's state on the device (kernels/paging/state.cuh): allocated, reset and read here."""

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from moet.cache.reference import AGE_TOUCHES_PER_ROW, HEAT_MAX, HYSTERESIS
from moet.kernels.paging.state import COUNTERS, WORKING, Control, Mailbox, Plan, SlotClass
from moet.moe.slots import ClassSlots
from moet.store import HostStore


class _Arrays:
    """Tables of one class and its pool."""

    def __init__(self, rows: int, slots: int, slot_bytes: int, device: torch.device) -> None:
        self.capacity = slots
        self.slot_of = torch.empty(rows, dtype=torch.int32, device=device)
        self.heat = torch.empty(rows, dtype=torch.int32, device=device)
        self.row_of = torch.empty(slots, dtype=torch.int32, device=device)
        self.valid = torch.empty(slots, dtype=torch.int32, device=device)
        self.stamp = torch.empty(slots, dtype=torch.int64, device=device)
        self.pool = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)


class Tables:
    """One SlotClass a class, a Control and the Plans. pairs: most (token, place) pairs of a batch; limit_s: see Control.limit_ns."""

    def __init__(self, store: HostStore, device: torch.device, pairs: int, limit_s: float) -> None:
        self.store, self.device = store, device
        self._classes = torch.zeros(len(store.classes) * ctypes.sizeof(SlotClass), dtype=torch.uint8, device=device)
        self._control = torch.zeros(ctypes.sizeof(Control), dtype=torch.uint8, device=device)
        self._plans = torch.zeros(3, ctypes.sizeof(Plan), dtype=torch.uint8, device=device)   # of decoding, and two that scans take in turn
        self._pairs = torch.zeros(3, pairs, dtype=torch.int32, device=device)
        for i in range(3):
            plan = Plan(pairs=self._pairs[i].data_ptr())
            _write(self._plans[i], plan)
        # Requests are numbered for a store's whole life: another runtime over it goes on where the one before stopped.
        posted = Mailbox.from_address(store.mailbox).posted if store.mailbox else 0
        _write(self._control, Control(posted=posted, mailbox=store.mailbox, failures=store.failures, limit_ns=int(limit_s * 1e9)))
        self._arrays: list[_Arrays] = []
        self.armed = False
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._words = torch.zeros(len(COUNTERS), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._base = np.zeros(len(COUNTERS), np.int64)

    # --- addresses that launches carry; none changes after allocate()

    def slots_address(self, cls: int) -> int:
        return self._classes.data_ptr() + cls * ctypes.sizeof(SlotClass)

    @property
    def control_address(self) -> int:
        return self._control.data_ptr()

    def plan(self, which: int) -> int:
        """0: of decoding; 1, 2: scans take them in turn."""
        return self._plans[which].data_ptr()

    # --- memory

    def allocate(self, slots: Sequence[ClassSlots]) -> None:
        """Once. Raises torch.OutOfMemoryError, after which it may be tried again with less."""
        self._arrays = [_Arrays(c.rows, s.total, c.slot_bytes, self.device) for c, s in zip(self.store.classes, slots, strict=True)]
        self.reset(slots)

    @property
    def capacities(self) -> list[int]:
        """Slots that there is memory for, of each class, rings included."""
        return [a.capacity for a in self._arrays]

    def reset(self, slots: Sequence[ClassSlots]) -> None:
        """Empties all slots and heat; at most `capacities` slots."""
        self._wait()
        for i, (c, s, a) in enumerate(zip(self.store.classes, slots, self._arrays, strict=True)):
            a.slot_of.fill_(-1)
            a.row_of.fill_(-1)
            a.heat.zero_()
            a.valid.zero_()
            working = s.slots - s.staging
            a.stamp.fill_(WORKING)
            a.stamp[working : s.slots] = torch.arange(s.staging, dtype=torch.int64, device=self.device)   # oldest first, as the specification starts
            _write(
                self._classes[i * ctypes.sizeof(SlotClass) : (i + 1) * ctypes.sizeof(SlotClass)],
                SlotClass(
                    rows=c.rows, slots=s.slots, staging=s.staging, ring=s.ring, hysteresis=HYSTERESIS, age_every=AGE_TOUCHES_PER_ROW * c.rows,
                    slot_bytes=c.slot_bytes, newest=s.staging, oldest=-1, pool=a.pool.data_ptr(), arena=c.arena, location=c.location,
                    slot_of=a.slot_of.data_ptr(), row_of=a.row_of.data_ptr(), heat=a.heat.data_ptr(), valid=a.valid.data_ptr(), stamp=a.stamp.data_ptr(),
                ),
            )  # fmt: skip
        self.clear_counters()
        self._wait()

    def arm(self, on: bool) -> None:
        self.armed = on
        self._control[: ctypes.sizeof(ctypes.c_uint32)].view(torch.int32).fill_(int(on))
        self._wait()

    def set_lookup_only(self, on: bool) -> None:
        """For the baseline of benchmarks."""
        start = Control.lookup_only.offset
        self._control[start : start + 4].view(torch.int32).fill_(int(on))

    def set_heat(self, layers: Mapping[int, tuple[int, int, int]], heat: Mapping[int, np.ndarray] | None) -> None:
        """layers: index -> class, first row, experts. None: no row has any."""
        self._wait()
        for index, (cls, first, experts) in layers.items():
            values = np.zeros(experts, np.int32) if heat is None else np.minimum(np.asarray(heat[index], np.uint32), HEAT_MAX).view(np.int32)
            self._arrays[cls].heat[first : first + experts] = torch.from_numpy(values.copy()).to(self.device)
        for i in range(len(self._arrays)):
            at = i * ctypes.sizeof(SlotClass) + SlotClass.coldest.offset
            self._classes[at : at + 4].zero_()   # resolve's bound on the working set's heat holds no longer
        self._wait()

    def heat(self) -> list[np.ndarray]:
        """uint32 [rows] of each class."""
        self._wait()
        return [a.heat.cpu().numpy().view(np.uint32) for a in self._arrays]

    # --- counters

    def _counter_words(self) -> torch.Tensor:
        start = Control.counter.offset
        return self._control[start : start + 8 * len(COUNTERS)].view(torch.int64)

    def clear_counters(self) -> None:
        """Subtracted from now on; the device's own words only grow."""
        self._base = np.zeros(len(COUNTERS), np.int64)
        self._base = self.read_counters()

    def read_counters(self) -> np.ndarray:
        """int64 [len(COUNTERS)], through a stream of its own: what runs is neither waited for nor held up."""
        if self._beside is None:
            return self._counter_words().numpy().copy() - self._base
        with torch.cuda.stream(self._beside):
            self._words.copy_(self._counter_words(), non_blocking=True)
        self._beside.synchronize()
        return self._words.numpy().copy() - self._base

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _write(to: torch.Tensor, struct: ctypes.Structure) -> None:
    to.copy_(torch.frombuffer(bytearray(bytes(struct)), dtype=torch.uint8))
