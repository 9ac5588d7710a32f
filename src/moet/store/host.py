"""The expert store of a host that feeds a GPU: rows in an arena that the device reads by itself, and a native server that reads
from files what it asks for. docs/pager.md, "On a GPU: the mailbox"."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet.store.failures import FailureWords
from moet.store.native import CHostOptions, lib
from moet.store.pinned import Register, register_all
from moet.store.rows import NativeRows, Source

_i32, _i64 = ctypes.c_int32, ctypes.c_int64
FILL_ROWS = 128  # between two words of progress, during which no request is served


@dataclass(frozen=True)
class HostClass:
    """Layers whose rows take one slot size. layers: a layer's index -> the class's row of its expert 0; the others follow.
    arena, location: addresses of arena slot 0 and of the words that say where each row is (uint64 [rows]).
    resident: every row has an arena slot, number `row`, so no request for one is ever posted once it is there."""

    slot_bytes: int
    rows: int
    layers: Mapping[int, int]
    arena_slots: int
    arena: int
    location: int
    resident: bool


@dataclass(frozen=True)
class SlotLayout:
    """Where the rank's part of a row is in a slot: byte offsets of w13, w2, extras. Its tiles: [tile_begin, tile_end)."""

    segments: tuple[int, int, int]
    slot_bytes: int
    tile_begin: int
    tile_end: int


class HostStore(NativeRows):
    """Rows of one rank in RAM, and the mailbox by which a device asks for those that are only in files.

    layers: a layer's index in the model -> its rows. ram_bytes: of the arena; 0 for room for all rows. direct_io, verify,
    counters_path: as for Pager. failures_path: see FailureWords.
    register: called with (address, bytes) of each piece of memory that the device reads, after its pages exist; what it returns,
    if not None, is called at close. None: plain memory, for a device that is this CPU.
    heat counts requests, and what the device finds by itself is none: told the device's heat now and then (set_heat, at any time), the server
    keeps in RAM what the device uses. Of counters, hits and misses are requests whose row was in the arena after all, and those that needed a read.
    Raises StoreError: a file is missing or cut, the budget is below the minimum, or memory cannot be registered.
    """

    KIND, NAME = "host", "host store"

    def __init__(
        self,
        layers: Mapping[int, Source],
        *,
        ram_bytes: int = 0,
        rank: int = 0,
        world: int = 1,
        io_threads: int = 8,
        direct_io: bool = True,
        verify: bool = True,
        chunk_bytes: int = 1 << 20,
        counters_path: Path | str | None = None,
        failures_path: Path | str | None = None,
        register: Register | None = None,
    ) -> None:
        self._describe(layers, rank, world)
        self.served: Callable[[], object | None] | None = None  # the runtime that posts requests, a weak reference
        self._registered: list[Callable[[], None]] = []
        options = CHostOptions(
            ram_bytes=ram_bytes,
            chunk_bytes=chunk_bytes,
            counters_path=bytes(Path(counters_path)) if counters_path else None,
            rank=rank,
            world=world,
            io_threads=io_threads,
            direct_io=direct_io,
            verify=verify,
        )
        self._open(lib().moet_host_open, options)
        self.failure_words = None
        try:
            control = (_i64 * 3)()
            self._call("control", control)
            self.mailbox, self._control = control[0], (control[1], control[2])
            self.classes, self._layouts = self._read_classes()
            self.failure_words = FailureWords(failures_path, rank, world)
            if register is not None:
                register_all(register, self._pieces(), self._registered)
        except BaseException:
            self.close()
            raise

    def _read_classes(self) -> tuple[list[HostClass], dict[int, SlotLayout]]:
        members: dict[int, dict[int, int]] = {}
        layouts = {}
        for index, position in self._position.items():
            v = (_i64 * 8)()
            self._call("layout", position, v)
            members.setdefault(v[0], {})[index] = v[1]
            layouts[index] = SlotLayout((v[2], v[3], v[4]), *v[5:8])
        values, count = (_i64 * (6 * (len(self.layers) or 1)))(), _i32()
        self._call("classes", values, len(self.layers), ctypes.byref(count))
        classes = []
        for c in range(count.value):
            slot_bytes, rows, slots, resident, arena, location = values[6 * c : 6 * c + 6]
            classes.append(HostClass(slot_bytes, rows, members[c], slots, arena, location, bool(resident)))
        return classes, layouts

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """What a device reads: (address, bytes, unit); a piece may be cut at any multiple of its unit."""
        yield (*self._control, self._control[1])
        yield self.failure_words.start, self.failure_words.bytes, self.failure_words.bytes
        for c in self.classes:
            yield c.arena, c.arena_slots * c.slot_bytes, c.slot_bytes

    def layout(self, layer: int) -> SlotLayout:
        """Of the rows of a layer."""
        self.position(layer)
        return self._layouts[layer]

    @property
    def failures(self) -> int:
        """Address of this rank's failure word, uint32."""
        return self.failure_words.address

    def fill(
        self, heat: Mapping[int, np.ndarray] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Reads rows into the arena, in file order, and returns how many came: all rows of classes that have room for all, else
        the hottest by heat (set_heat is called with it; None: the heat that is there), rows of heat 0 left out.

        progress: called with (rows looked at, rows to look at). For the start, before the device runs: its requests wait
        meanwhile. Raises StoreError if a row of a resident class cannot be read; others are left to the request that needs them.
        """
        if heat is not None:
            self.set_heat(heat)
        wanted, came, total = _i64(), _i64(), 0
        self._call("plan_fill", ctypes.byref(wanted))
        for done in range(0, wanted.value, FILL_ROWS):
            self._call("fill", FILL_ROWS, ctypes.byref(came))
            total += max(came.value, 0)
            if progress is not None:
                progress(min(done + FILL_ROWS, wanted.value), wanted.value)
        return total

    def row_address(self, layer: int, expert: int) -> int:
        """Of the row's arena slot, 0 if it has none. Good until a request takes the slot, so in a class that is not resident only
        while the device does not run."""
        address = _i64()
        self._call("row", self.position(layer), expert, ctypes.byref(address))
        return address.value

    def failure_text(self) -> str:
        """Why the last request that failed did: file, layer, expert, errno or checksum; empty if none has."""
        return self._text("failure")

    def inject(self, layer: int, expert: int, kind: int, value: int = 0, times: int = 1) -> None:
        """For tests. The next `times` preads of a row: fail with errno `value` (kind 0), read at most `value` bytes (1), start
        `value` us late (2), flip a bit of byte `value` of what they read (3)."""
        self._call("inject", self.position(layer), expert, kind, value, times)

    def stop_server(self) -> None:
        """For tests: the server ends as if its thread had died. Requests are answered no more."""
        self._call("stop_server")

    def close(self) -> None:
        """Ends the server and the I/O threads, unregisters and unmaps the memory: no device may use it then. Twice is fine."""
        if self._handle:
            self.stop_server()
            with ExitStack() as undo:  # last first, and all of it whatever one of them raises
                if self.failure_words is not None:
                    undo.callback(self.failure_words.close)
                handle, self._handle = self._handle, ctypes.c_void_p()
                undo.callback(lib().moet_host_close, handle)
                for unregister in self._registered:
                    undo.callback(unregister)
                self._registered = []
