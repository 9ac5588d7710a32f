"""The native bookkeeping behind the interface of `reference.Bookkeeping`, without an arena."""

import ctypes
from collections.abc import Sequence

import numpy as np

from moet import native
from moet.cache.reference import Step

_i32, _i64, _handle = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def _function(name: str, *arguments):
    function = getattr(native.lib(), f"moet_bookkeeping_{name}")
    function.argtypes = [*arguments, ctypes.c_char_p, ctypes.c_size_t]
    return function


class NativeBookkeeping:
    """As `reference.Bookkeeping`; steps come as int32 [n, 6] from `plan` (row, slot, after, wave, evicted,
    hit) or as Steps from `begin`."""

    def __init__(
        self,
        rows: int,
        slots: int,
        staging: int | None = None,
        hysteresis: int | None = None,
        age_every: int | None = None,
    ) -> None:
        self._handle, self._rows, self._slots = _handle(), rows, slots
        values = [-1 if v is None else v for v in (staging, hysteresis, age_every)]
        native.call(
            _function("open", _i64, _i32, _i32, _i32, _i64, ctypes.c_void_p),
            rows,
            slots,
            *values,
            ctypes.byref(self._handle),
        )
        self._begin = _function("begin", _handle, ctypes.c_void_p, _i32, _i32, ctypes.c_void_p)

    def plan(self, rows: np.ndarray, scan: bool = False) -> np.ndarray:
        rows = np.ascontiguousarray(rows, np.int32)
        steps = np.empty((len(rows), 6), np.int32)
        native.call(self._begin, self._handle, rows.ctypes.data, len(rows), scan, steps.ctypes.data)
        return steps

    def begin(self, rows: Sequence[int], scan: bool = False) -> list[Step]:
        return [
            Step(*map(int, step[:5]), hit=bool(step[5])) for step in self.plan(np.array(rows, np.int32), scan)
        ]

    def fill(self, row: int) -> int:
        slot = _i32()
        native.call(_function("fill", _handle, _i32, ctypes.c_void_p), self._handle, row, ctypes.byref(slot))
        return slot.value

    def state(self) -> dict[str, list[int]]:
        """heat [rows], row_of [slots], staged [slots] (0 or 1), counts [evictions, admitted]."""
        heat, row_of = np.empty(self._rows, np.uint32), np.empty(self._slots, np.int32)
        staged, counts = np.empty(self._slots, np.uint8), np.empty(2, np.uint64)
        arrays = [heat, row_of, staged, counts]
        native.call(
            _function("state", _handle, *[ctypes.c_void_p] * 4),
            self._handle,
            *[a.ctypes.data for a in arrays],
        )
        return dict(zip(("heat", "row_of", "staged", "counts"), [a.tolist() for a in arrays], strict=True))

    def close(self) -> None:
        if self._handle:
            close = native.lib().moet_bookkeeping_close
            close.argtypes, close.restype = [_handle], None
            close(self._handle)
            self._handle = _handle()

    def __del__(self) -> None:
        self.close()
