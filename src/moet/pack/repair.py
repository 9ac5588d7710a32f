"""`moet verify --repair`: what is bad is made again from the checkpoint, compared with moet.json, and only
then written; the rest is not touched."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from moet.checkpoint import Checkpoint, ShardSource
from moet.errors import PackError
from moet.layout import check_row, crc32c
from moet.pack import dense, durable, fingerprint, lock, modelfiles, rowfile
from moet.pack import manifest as manifests
from moet.pack.durable import TempFile, explained
from moet.pack.faults import Fault, Verdict
from moet.pack.layerwriter import Geometries, RowEncoder, workers_that_fit
from moet.pack.manifest import Layer, Manifest, RowFile
from moet.pack.packer import rebuild, small_files
from moet.pack.progress import Progress
from moet.pack.verify import verify


@dataclass(frozen=True)
class Repaired:
    """`before`: what verify found. `rewritten`: the files that were written to, whole or in part."""

    before: Verdict
    rewritten: tuple[str, ...]


def repair(
    root: Path, source: ShardSource, *, workers: int | None = None, progress: Progress | None = None
) -> Repaired:
    """Verifies the pack `root` and mends it from `source`.

    If moet.json itself is damaged, the pack is made again as a whole, provided that the rows which are
    intact by their own checksums come out the same.
    Raises PackError before anything is written if `source` is not what the pack was made from.
    """
    root, workers, progress = Path(root), workers or len(os.sched_getaffinity(0)), progress or Progress()
    modelfiles.refuse_folders(source.root, root)
    before = verify(root, workers=workers, progress=progress)
    if before.ok:
        return Repaired(before, ())
    with lock.hold(root):
        durable.sweep(root)
        if any(fault.kind == "manifest" for fault in before.faults):
            _refuse_other_rows(root, Checkpoint.open(source))
            native = any(root.glob("experts/native-*.safetensors"))
            rebuild(source, root, native=native, workers=workers, progress=progress)
            return Repaired(before, ("every file",))
        mender = _Mender(root, source, manifests.read(root), workers)
        rewritten = mender.mend(before.faults)
        lock.remove(root)
    return Repaired(before, tuple(rewritten))


class _Mender:
    def __init__(self, root: Path, source: ShardSource, manifest: Manifest, workers: int) -> None:
        self.root, self.source, self.manifest, self.workers = root, source, manifest, workers
        self.checkpoint = Checkpoint.open(source)
        found = fingerprint.names(self.checkpoint.config, self.checkpoint.names)
        if found != manifest.names:
            raise _other_source(root, source, "config and tensor names", manifest.names, found)
        self.layers = {layer.index: layer for layer in manifest.layers}

    def mend(self, faults: Iterable[Fault]) -> list[str]:
        by_file: dict[str, list[Fault]] = {}
        for fault in faults:
            by_file.setdefault(fault.file, []).append(fault)
        for name, found in by_file.items():
            with explained(self.root, name):
                if found[0].layer is None:
                    self._file(name)
                else:
                    self._rows(found)
        return list(by_file)

    def _rows(self, faults: list[Fault]) -> None:
        layer = self.layers[faults[0].layer or 0]
        kind = faults[0].rows
        rows = layer.native if kind == "native" else layer.base
        assert rows is not None
        head = rowfile.header(layer.index, rows.format, layer.experts, rows.row_bytes)
        if any(fault.kind == "row file" for fault in faults):
            with TempFile(self.root, rows.file) as out:
                out.write(head, 0)
                self._encode(layer, rows, kind, range(layer.experts), out.write)
                out.commit()
            return
        fd = os.open(self.root / rows.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            if any(fault.kind == "header" for fault in faults):
                durable.pwrite_all(fd, head, 0)
            experts = [fault.expert for fault in faults if fault.expert is not None]
            self._encode(
                layer, rows, kind, experts, lambda data, offset: durable.pwrite_all(fd, data, offset)
            )
            os.fsync(fd)
        finally:
            os.close(fd)

    def _encode(
        self, layer: Layer, rows: RowFile, kind: str, experts: Iterable[int], write: Callable
    ) -> None:
        experts = list(experts)
        if not experts:
            return
        encoder = RowEncoder(Geometries.of(self.checkpoint.expert(layer.index, 0)), kind == "native")

        def one(expert: int) -> None:
            _, base, native = encoder(self.checkpoint.expert(layer.index, expert))
            row = native if kind == "native" else base
            found = f"{crc32c(row):08x}"
            if found != rows.rows[expert]:
                raise _other_source(
                    self.root,
                    self.source,
                    f"layer {layer.index}, expert {expert}, {kind} row",
                    rows.rows[expert],
                    found,
                )
            write(row, rows.data_offset + expert * rows.row_bytes)

        with ThreadPoolExecutor(
            workers_that_fit(self.workers, self.checkpoint.expert_bytes(layer.index))
        ) as pool:
            list(pool.map(one, experts))

    def _file(self, name: str) -> None:
        wanted = self.manifest.files[name]
        shards = {
            dense.file_name(i, len(self.checkpoint.dense_shards)): shard
            for i, shard in enumerate(self.checkpoint.dense_shards, 1)
        }
        with TempFile(self.root, name) as out:
            if name in shards:
                found = dense.copy(self.checkpoint, shards[name], name, out).digest.blake3
            else:
                data = self._small_files(shards).get(name, b"")
                found = blake3(data).hexdigest()
                out.write(data, 0)
            if found != wanted.blake3:
                raise _other_source(self.root, self.source, name, wanted.blake3, found)
            out.commit()

    def _small_files(self, shards: dict[str, str]) -> dict[str, bytes]:
        tensor_files = {
            tensor: file for file, shard in shards.items() for tensor in self.checkpoint.dense_names(shard)
        }
        total = sum(self.checkpoint.tensor_info(tensor).nbytes for tensor in tensor_files)
        return dict(small_files(self.source.root, tensor_files, total))


def _refuse_other_rows(root: Path, checkpoint: Checkpoint) -> None:
    """Without a readable moet.json: the first base row of every layer that is intact by its own checksums
    must come out of the source again."""
    compared = 0
    for layer in checkpoint.spec.layers:
        path = root / rowfile.file_name("base", layer.index)
        try:
            offset, experts, row_bytes = rowfile.read_header(path)
        except PackError:
            continue
        weights = checkpoint.expert(layer.index, 0)
        encoder = RowEncoder(Geometries.of(weights), native=False)
        if (experts, row_bytes) != (layer.experts, encoder.geometries.base.row_bytes):
            raise _other_source(
                root,
                checkpoint.source,
                f"{path.name}, shape",
                f"{experts} rows of {row_bytes}",
                f"{layer.experts} rows",
            )
        row = _read_row(path, offset, row_bytes)
        if check_row(encoder.geometries.base, row):
            continue
        compared += 1
        if crc32c(row) != (found := crc32c(encoder(weights)[1])):
            raise _other_source(
                root,
                checkpoint.source,
                f"layer {layer.index}, expert 0, base row",
                f"{crc32c(row):08x}",
                f"{found:08x}",
            )
    if not compared:
        raise PackError(
            f"{root}: {manifests.NAME} is damaged and no layer's first row is intact; delete the folder and pack again"
        )


def _read_row(path: Path, offset: int, row_bytes: int):
    import numpy as np

    row = np.empty(row_bytes, np.uint8)
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        file.readinto(memoryview(row))
    return row


def _other_source(root: Path, source: ShardSource, what: str, expected: object, found: object) -> PackError:
    return PackError(
        f"{source.root}: is not what {root} was made from: {what}: expected {expected}, found {found}. Repair from the source it was made from"
    )
