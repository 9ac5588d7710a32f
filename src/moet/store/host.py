"""The expert store of a host that feeds a GPU: rows in an arena that the device reads by itself, and a native server that reads
from files what it asks for. docs/pager.md, "On a GPU: the mailbox"."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from moet import native
from moet.errors import StoreError
from moet.pack import Pack
from moet.store.counters import BLOCK_BYTES, Counters
from moet.store.failures import FailureWords
from moet.store.native import CHostOptions, CLayer, lib
from moet.store.pager import Source, c_layer
from moet.store.pinned import Register, register_all

_i32, _i64, _u32, _u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
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


class HostStore:
    """Rows of one rank in RAM, and the mailbox by which a device asks for those that are only in files.

    layers: a layer's index in the model -> its rows. ram_bytes: of the arena; 0 for room for all rows. direct_io, verify,
    counters_path: as for Pager. failures_path: see FailureWords.
    register: called with (address, bytes) of each piece of memory that the device reads, after its pages exist; what it returns,
    if not None, is called at close. None: plain memory, for a device that is this CPU.
    Raises StoreError: a file is missing or cut, the budget is below the minimum, or memory cannot be registered.
    """

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
        self._handle = ctypes.c_void_p()
        self.served: Callable[[], object | None] | None = None  # the runtime that posts requests, a weak reference
        self._registered: list[Callable[[], None]] = []
        self.layers = dict(sorted(layers.items()))
        self.rank, self.world = rank, world
        self._position = {index: i for i, index in enumerate(self.layers)}
        for source in self.layers.values():
            source.geometry.slice(rank, world)  # says so if a rank would get no tile
        rows = (CLayer * len(self.layers))(*[c_layer(index, source) for index, source in self.layers.items()])
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
        native.call(
            lib().moet_host_open,
            rows,
            len(rows),
            ctypes.byref(options),
            ctypes.byref(self._handle),
            error=StoreError,
        )
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

    @classmethod
    def from_pack(cls, pack: Pack, precision: str, **options) -> Self:
        """Over the rows of a pack; precision: `base` or `native`. Options as of the class. Raises PackError if the pack lacks
        those rows."""
        return cls({index: files.rows(precision) for index, files in pack.layers.items()}, **options)

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

    @property
    def handle(self) -> ctypes.c_void_p:
        """moet::HostStore*. Raises StoreError after close()."""
        if not self._handle:
            raise StoreError("host store: expected an open store, found a closed one")
        return self._handle

    def position(self, layer: int) -> int:
        """Number by which native code knows a layer. Raises StoreError for one that has no rows here."""
        try:
            return self._position[layer]
        except KeyError:
            raise StoreError(
                f"layer {layer}: expected one of the layers with experts: {list(self._position)}"
            ) from None

    def _call(self, name: str, *arguments) -> None:
        native.call(getattr(lib(), f"moet_host_{name}"), self.handle, *arguments, error=StoreError)

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

    def put(self, layer: int, expert: int, row: np.ndarray) -> None:
        """Copies a row, uint8 [row_bytes], of a layer without a file into its slot. Different rows may be put by different
        threads."""
        position = self.position(layer)
        expected = self.layers[layer].geometry.row_bytes
        if row.dtype != np.uint8 or row.shape != (expected,) or not row.flags.c_contiguous:
            raise StoreError(
                f"layer {layer}, expert {expert}: expected a contiguous uint8 row of {expected} bytes, "
                f"found {row.dtype} {row.shape}"
            )
        self._call("put", position, expert, row.ctypes.data)

    def row_address(self, layer: int, expert: int) -> int:
        """Of the row's arena slot, 0 if it has none. Good until a request takes the slot, so in a class that is not resident only
        while the device does not run."""
        address = _i64()
        self._call("row", self.position(layer), expert, ctypes.byref(address))
        return address.value

    def heat(self) -> dict[int, np.ndarray]:
        """uint32 [experts] of each layer: how often a row was requested, 16 a time, aged. What the device finds by itself is not
        in it: see set_heat."""
        flat = np.empty(sum(s.experts for s in self.layers.values()), np.uint32)
        self._call("heat_get", flat.ctypes.data_as(ctypes.POINTER(_u32)))
        ends = np.cumsum([s.experts for s in self.layers.values()])
        return dict(zip(self.layers, np.split(flat, ends[:-1]), strict=True))

    def set_heat(self, heat: Mapping[int, np.ndarray]) -> None:
        """Replaces all heat, at any time. The server hears of requests only: told the device's heat now and then, it keeps in RAM
        what the device uses. Raises StoreError unless there is one uint32 [experts] for each layer."""
        for layer, source in self.layers.items():
            if layer not in heat or heat[layer].shape != (source.experts,):
                found = heat[layer].shape if layer in heat else "none"
                raise StoreError(f"heat of layer {layer}: expected {source.experts} values, found {found}")
        flat = np.concatenate([np.asarray(heat[layer], np.uint32) for layer in self.layers])
        self._call("heat_set", flat.ctypes.data_as(ctypes.POINTER(_u32)))

    def counters(self) -> Counters:
        """hits, misses: requests whose row was in the arena after all, and those that needed a read."""
        block = ctypes.create_string_buffer(BLOCK_BYTES)
        self._call("counters", ctypes.cast(block, ctypes.POINTER(_u64)), BLOCK_BYTES // 8)
        return Counters.from_bytes(block.raw)

    def _text(self, name: str) -> str:
        text = ctypes.create_string_buffer(1024)
        self._call(name, text, len(text))
        return text.value.decode(errors="replace")

    @property
    def warning(self) -> str:
        """Why rows are read through the page cache although direct_io was asked for; empty if they are not."""
        return self._text("warning")

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
