"""What a Pager and a HostStore have in common: layers of rows behind a native handle, with heat and counters."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from moet import native
from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.pack import Pack
from moet.store.counters import BLOCK_BYTES, Counters
from moet.store.native import CLayer, lib

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class Source(Protocol):
    """Where the rows of a layer are; `moet.pack.Rows` and `moet.store.RowSource` are two."""

    path: Path | None
    data_offset: int
    experts: int
    geometry: RowGeometry


class NativeRows:
    """The part of a store that does not depend on who drives it. KIND: of the native functions, `moet_KIND_*`; NAME: what messages call it."""

    KIND: ClassVar[str]
    NAME: ClassVar[str]

    def _describe(self, layers: Mapping[int, Source], rank: int, world: int) -> None:
        """Raises ConfigError if a rank would get no tile of a layer."""
        self._handle = ctypes.c_void_p()
        self.layers = dict(sorted(layers.items()))
        self.rank, self.world = rank, world
        self._position = {index: i for i, index in enumerate(self.layers)}
        for source in self.layers.values():
            source.geometry.slice(rank, world)

    def _open(self, open_native: Callable[..., int], options: ctypes.Structure) -> None:
        rows = (CLayer * len(self.layers))(*[_c_layer(index, source) for index, source in self.layers.items()])
        native.call(open_native, rows, len(rows), ctypes.byref(options), ctypes.byref(self._handle), error=StoreError)

    @classmethod
    def from_pack(cls, pack: Pack, precision: str, **options: Any) -> Self:
        """Over the rows of a pack; precision: `base` or `native`. Options as of the class. Raises PackError if the pack lacks
        those rows."""
        return cls({index: files.rows(precision) for index, files in pack.layers.items()}, **options)

    @property
    def handle(self) -> ctypes.c_void_p:
        """The native object. Raises StoreError after close()."""
        if not self._handle:
            raise StoreError(f"{self.NAME}: expected an open {self.NAME.split()[-1]}, found a closed one")
        return self._handle

    def _call(self, name: str, *arguments: Any) -> None:
        native.call(getattr(lib(), f"moet_{self.KIND}_{name}"), self.handle, *arguments, error=StoreError)

    def position(self, layer: int) -> int:
        """Number by which native code knows a layer. Raises StoreError for one that has no rows here."""
        try:
            return self._position[layer]
        except KeyError:
            raise StoreError(
                f"layer {layer}: expected one of the layers with experts: {list(self._position)}"
            ) from None

    def put(self, layer: int, expert: int, row: np.ndarray) -> None:
        """Copies a row, uint8 [row_bytes], of a layer without a file into its slot, for good. Different rows may be put by
        different threads."""
        position = self.position(layer)
        expected = self.layers[layer].geometry.row_bytes
        if row.dtype != np.uint8 or row.shape != (expected,) or not row.flags.c_contiguous:
            raise StoreError(
                f"layer {layer}, expert {expert}: expected a contiguous uint8 row of {expected} bytes, "
                f"found {row.dtype} {row.shape}"
            )
        self._call("put", position, expert, row.ctypes.data)

    def heat(self) -> dict[int, np.ndarray]:
        """uint32 [experts] of each layer: how often a row was asked for, 16 a time, aged."""
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

    def _text(self, name: str) -> str:
        text = ctypes.create_string_buffer(1024)
        self._call(name, text, len(text))
        return text.value.decode(errors="replace")

    @property
    def warning(self) -> str:
        """Why rows are read through the page cache although direct_io was asked for; empty if they are not."""
        return self._text("warning")

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _c_layer(index: int, source: Source) -> CLayer:
    """A layer as native code takes it."""
    g, path = source.geometry, bytes(source.path) if source.path else None
    return CLayer(
        path, source.data_offset, source.experts, g.format_index, g.hidden, g.inter, g.biased, index
    )
