"""Opening a pack: what the store, the kernels and the engine need to find every row, and nothing read but
moet.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moet.errors import PackError
from moet.layout import RowGeometry
from moet.models import Activation
from moet.pack import manifest as manifests
from moet.pack.manifest import Layer, Manifest


@dataclass(frozen=True)
class Rows:
    """Where the rows of one layer at one format are: row e is `geometry.row_bytes` bytes at data_offset + e
    * row_bytes of `path`.

    checksums   crc32c of each whole row, by expert
    """

    path: Path
    data_offset: int
    geometry: RowGeometry
    experts: int
    scale_dtype: str
    checksums: tuple[int, ...]

    def offset(self, expert: int) -> int:
        return self.data_offset + expert * self.geometry.row_bytes


@dataclass(frozen=True)
class LayerFiles:
    """One MoE layer. `native` is None in a pack that was made without native rows."""

    index: int
    prefix: str
    experts: int
    inter: int
    mtp: bool
    base: Rows
    native: Rows | None

    def rows(self, precision: str) -> Rows:
        """`precision` is "base" or "native". Raises PackError if the pack does not have those rows."""
        found = {"base": self.base, "native": self.native}.get(precision)
        if found is None:
            have = "base" if self.native is None else "base, native"
            raise PackError(
                f"layer {self.index}: expected {precision} rows, found {have}; pack again with --native"
            )
        return found


@dataclass(frozen=True)
class Pack:
    """An opened pack. `layers` maps a layer's index to its files, ascending; `inter` is the largest of the
    layers'."""

    root: Path
    manifest: Manifest
    layers: dict[int, LayerFiles]
    activation: Activation
    hidden: int
    inter: int
    top_k: int
    fingerprint: str

    @property
    def has_native(self) -> bool:
        return all(layer.native is not None for layer in self.layers.values())

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Reads moet.json and checks that every row file is there and has its size; no row is read (`moet
        verify` does that).

        Raises PackError: no pack, an unfinished one, another format version, a changed moet.json, a missing
        or cut file.
        """
        root = Path(path)
        manifest = manifests.read(root)
        layers = {layer.index: _layer_files(root, manifest, layer) for layer in manifest.layers}
        a = manifest.activation
        return cls(
            root,
            manifest,
            layers,
            Activation(a.kind, a.limit, a.alpha),
            manifest.hidden,
            manifest.inter,
            manifest.top_k,
            manifest.fingerprint,
        )


def geometry(manifest: Manifest, layer: Layer, format: str) -> RowGeometry:
    return RowGeometry(format, manifest.hidden, layer.inter, layer.biased)


def _layer_files(root: Path, manifest: Manifest, layer: Layer) -> LayerFiles:
    def rows(file: manifests.RowFile | None) -> Rows | None:
        if file is None:
            return None
        path = root / file.file
        g = geometry(manifest, layer, file.format)
        if g.row_bytes != file.row_bytes:
            raise PackError(
                f"{path}: expected rows of {g.row_bytes} bytes ({file.format}), "
                f"found {file.row_bytes} in {manifests.NAME}"
            )
        try:
            size = path.stat().st_size
        except OSError as e:
            raise PackError(
                f"{path}: expected the rows of layer {layer.index}, found: {e.strerror}; "
                f"run `moet verify {root}`"
            ) from None
        if size != file.bytes:
            raise PackError(
                f"{path}: expected {file.bytes} bytes, found {size}; run `moet verify {root} --repair SRC`"
            )
        return Rows(
            path, file.data_offset, g, layer.experts, file.scale_dtype, tuple(int(x, 16) for x in file.rows)
        )

    base, native = rows(layer.base), rows(layer.native)
    assert base is not None
    return LayerFiles(layer.index, layer.prefix, layer.experts, layer.inter, layer.mtp, base, native)
