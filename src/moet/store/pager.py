"""The pager as Python sees it: opened over row files, handed to the kernels by its handle, asked for counters
and heat."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from moet import native
from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.pack import Pack
from moet.store.counters import BLOCK_BYTES, Counters
from moet.store.native import CLayer, COptions, lib

_i32, _i64, _u32, _u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64


class Source(Protocol):
    """Where the rows of a layer are; `moet.pack.Rows` and RowSource are two."""

    path: Path | None
    data_offset: int
    experts: int
    geometry: RowGeometry


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


class Pager:
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
        self._handle = ctypes.c_void_p()
        self.layers = dict(sorted(layers.items()))
        self.rank, self.world = rank, world
        self._position = {index: i for i, index in enumerate(self.layers)}
        for source in self.layers.values():
            source.geometry.slice(rank, world)  # says so if a rank would get no tile
        rows = (CLayer * len(self.layers))(*[c_layer(index, source) for index, source in self.layers.items()])
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
        native.call(
            lib().moet_pager_open,
            rows,
            len(rows),
            ctypes.byref(options),
            ctypes.byref(self._handle),
            error=StoreError,
        )

    @classmethod
    def from_pack(cls, pack: Pack, precision: str, **options) -> Self:
        """Over the rows of a pack; precision: `base` or `native`. Options as of the class. Raises PackError
        if the pack lacks those rows."""
        return cls({index: files.rows(precision) for index, files in pack.layers.items()}, **options)

    @property
    def handle(self) -> ctypes.c_void_p:
        """moet::Pager* for the kernels. Raises StoreError after close()."""
        if not self._handle:
            raise StoreError("pager: expected an open pager, found a closed one")
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
        native.call(getattr(lib(), f"moet_pager_{name}"), self.handle, *arguments, error=StoreError)

    def put(self, layer: int, expert: int, row: np.ndarray) -> None:
        """Copies a row, uint8 [row_bytes], of a layer without a file into its slot, for good. Different rows
        may be put by different threads."""
        position = self.position(layer)
        expected = self.layers[layer].geometry.row_bytes
        if row.dtype != np.uint8 or row.shape != (expected,) or not row.flags.c_contiguous:
            raise StoreError(
                f"layer {layer}, expert {expert}: expected a contiguous uint8 row of {expected} bytes, "
                f"found {row.dtype} {row.shape}"
            )
        self._call("put", position, expert, row.ctypes.data)

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

    def heat(self) -> dict[int, np.ndarray]:
        """uint32 [experts] of each layer: how often a row was asked for, aged."""
        flat = np.empty(sum(s.experts for s in self.layers.values()), np.uint32)
        self._call("heat_get", flat.ctypes.data_as(ctypes.POINTER(_u32)))
        ends = np.cumsum([s.experts for s in self.layers.values()])
        return dict(zip(self.layers, np.split(flat, ends[:-1]), strict=True))

    def set_heat(self, heat: Mapping[int, np.ndarray]) -> None:
        """Replaces all heat. Raises StoreError unless there is one uint32 [experts] for each layer."""
        for layer, source in self.layers.items():
            if layer not in heat or heat[layer].shape != (source.experts,):
                found = heat[layer].shape if layer in heat else "none"
                raise StoreError(f"heat of layer {layer}: expected {source.experts} values, found {found}")
        flat = np.concatenate([np.asarray(heat[layer], np.uint32) for layer in self.layers])
        self._call("heat_set", flat.ctypes.data_as(ctypes.POINTER(_u32)))

    def counters(self) -> Counters:
        block = ctypes.create_string_buffer(BLOCK_BYTES)
        self._call("counters", ctypes.cast(block, ctypes.POINTER(_u64)), BLOCK_BYTES // 8)
        return Counters.from_bytes(block.raw)

    def classes(self) -> list[SlotClass]:
        values, count = (_i64 * (5 * (len(self.layers) or 1)))(), _i32()
        self._call("classes", values, len(self.layers), ctypes.byref(count))
        return [
            SlotClass(*values[5 * i : 5 * i + 4], resident=bool(values[5 * i + 4]))
            for i in range(count.value)
        ]

    @property
    def warning(self) -> str:
        """Why rows are read through the page cache although direct_io was asked for; empty if they are
        not."""
        text = ctypes.create_string_buffer(1024)
        self._call("warning", text, len(text))
        return text.value.decode(errors="replace")

    def close(self) -> None:
        """Joins the I/O threads and unmaps the arena: views handed out are void. Twice is fine."""
        if self._handle:
            lib().moet_pager_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def c_layer(index: int, source: Source) -> CLayer:
    """A layer as native code takes it."""
    g, path = source.geometry, bytes(source.path) if source.path else None
    return CLayer(
        path, source.data_offset, source.experts, g.format_index, g.hidden, g.inter, g.biased, index
    )
