"""The pager as Python sees it: opened over row files, handed to the kernels by its handle, asked for counters
and heat."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet.layout import RowGeometry
from moet.store.native import COptions, lib
from moet.store.rows import NativeRows, Source

_i32, _i64 = ctypes.c_int32, ctypes.c_int64


@dataclass(frozen=True)
class RowSource:
    """Rows of a layer in any file, or, with path None, rows that arrive by `Pager.put` and never leave."""

    geometry: RowGeometry
    experts: int
    path: Path | None = None
    data_offset: int = 0


@dataclass(frozen=True)
class SlotClass:
    """Layers whose rows take one slot size share slots: `slots` for `rows`, numbered from first_slot.
    resident: rows that arrive by put."""

    slot_bytes: int
    rows: int
    slots: int
    first_slot: int
    resident: bool


class Pager(NativeRows):
    """Makes the rows of one rank readable, within a budget. One thread at a time may use it, except `put`,
    `counters` and the I/O behind it.

    layers: a layer's index in the model -> its rows. budget_bytes: of the arena, 0 for room for all rows.
    direct_io: O_DIRECT where a probe read works; else, and where it does not, reads go through the page
    cache, are counted apart and `warning` says why.
    counters_path: a file for the counters, which other processes can read. staging_slots, hysteresis,
    age_every: the policy; None for the defaults.
    Raises StoreError: a file is missing or cut, or the budget is below the minimum, which the message gives
    in bytes.
    """

    KIND, NAME = "pager", "pager"

    def __init__(
        self,
        layers: Mapping[int, Source],
        *,
        budget_bytes: int = 0,
        rank: int = 0,
        world: int = 1,
        io_threads: int = 8,
        direct_io: bool = True,
        verify: bool = True,
        chunk_bytes: int = 1 << 20,
        counters_path: Path | str | None = None,
        staging_slots: int | None = None,
        hysteresis: int | None = None,
        age_every: int | None = None,
    ) -> None:
        self._describe(layers, rank, world)
        options = COptions(
            budget_bytes=budget_bytes,
            chunk_bytes=chunk_bytes,
            age_every=-1 if age_every is None else age_every,
            counters_path=bytes(Path(counters_path)) if counters_path else None,
            rank=rank,
            world=world,
            io_threads=io_threads,
            direct_io=direct_io,
            verify=verify,
            staging_slots=-1 if staging_slots is None else staging_slots,
            hysteresis=-1 if hysteresis is None else hysteresis,
        )
        self._open(lib().moet_pager_open, options)

    def rows(
        self, layer: int, experts: Sequence[int], scan: bool = False
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Pages one layer in: yields (expert, w13, w2, extras), views of arena memory as uint8, each void
        once the next one is asked for.

        experts: distinct, ascending. What comes first is what was there first. Raises StoreError for a row
        that cannot be read.
        The kernels do the same without Python.
        """
        position = self.position(layer)
        lengths = [length for _, length in self.layers[layer].geometry.slice(self.rank, self.world).segments]
        ids = (_i32 * len(experts))(*experts)
        found, views, given = (_i32 * len(experts))(), (ctypes.c_void_p * (3 * len(experts)))(), _i32()
        self._call("begin", position, ids, len(experts), scan)
        try:
            while True:
                self._call("take", found, views, len(experts), ctypes.byref(given))
                if not given.value:
                    return
                for i in range(given.value):
                    parts = [
                        np.ctypeslib.as_array(
                            ctypes.cast(views[3 * i + k], ctypes.POINTER(ctypes.c_uint8)), (lengths[k],)
                        )
                        for k in range(3)
                    ]
                    yield found[i], *parts
        finally:
            self._call("end")

    def read(self, layer: int, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of w13, w2 and extras of one row, as uint8."""
        with closing(self.rows(layer, [expert])) as rows:
            return tuple(part.copy() for part in next(rows)[1:])

    def preheat(self, limit: int | None = None, *, wait: bool = False) -> int:
        """Posts reads of up to `limit` (None: any number) of the hottest rows into free slots, behind all
        reads that a layer waits for.

        Rows without heat are read only where every row of their size has a slot. Returns how many; with wait,
        after they landed.
        A row that fails here fails again, and loudly, when a layer asks for it.
        """
        posted = _i64()
        self._call("preheat", (1 << 62) if limit is None else limit, wait, ctypes.byref(posted))
        return posted.value

    def classes(self) -> list[SlotClass]:
        values, count = (_i64 * (5 * (len(self.layers) or 1)))(), _i32()
        self._call("classes", values, len(self.layers), ctypes.byref(count))
        return [
            SlotClass(*values[5 * i : 5 * i + 4], resident=bool(values[5 * i + 4]))
            for i in range(count.value)
        ]

    def close(self) -> None:
        """Joins the I/O threads and unmaps the arena: views handed out are void. Twice is fine."""
        if self._handle:
            lib().moet_pager_close(self._handle)
            self._handle = ctypes.c_void_p()
