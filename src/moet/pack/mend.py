"""Making parts of a pack again from the checkpoint: compared with moet.json first, and only then written."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from moet.checkpoint import Checkpoint, ShardSource
from moet.errors import PackError
from moet.layout import crc32c
from moet.pack import dense, durable, fingerprint, rowfile
from moet.pack.durable import TempFile, explained
from moet.pack.faults import Fault
from moet.pack.finish import small_files
from moet.pack.layerwriter import Geometries, RowEncoder, workers_that_fit
from moet.pack.manifest import Layer, Manifest, RowFile
from moet.quantize.schemes import PLAIN_SCHEME

Write = Callable[[object, int], None]


def other_source(root: Path, source: ShardSource, what: str, expected: object, found: object) -> PackError:
    return PackError(
        f"{source.root}: is not what {root} was made from: {what}: expected {expected}, found {found}. "
        "Repair from the source it was made from"
    )


class Mender:
    """`left`: faults of base rows that the checkpoint alone does not give.

    Raises PackError if the config or the tensor names of `source` are not those that the pack was made from.
    """

    def __init__(self, root: Path, source: ShardSource, manifest: Manifest, workers: int) -> None:
        self.root, self.source, self.manifest, self.workers = root, source, manifest, workers
        self.checkpoint = Checkpoint.open(source)
        found = fingerprint.names(self.checkpoint.config, self.checkpoint.names)
        if found != manifest.names:
            raise other_source(root, source, "config and tensor names", manifest.names, found)
        self.left: list[Fault] = []
        self.layers = {layer.index: layer for layer in manifest.layers}
        shards = self.checkpoint.dense_shards
        self.dense_shards = {dense.file_name(i, len(shards)): shard for i, shard in enumerate(shards, 1)}

    def mend(self, faults: Iterable[Fault]) -> list[str]:
        """Mends all faults but those of moet.json and `left`; returns the files that were written to.

        Raises PackError at the first part that the source does not give as it was; what is mended by then
        stays.
        """
        by_file: dict[str, list[Fault]] = {}
        for fault in faults:
            by_file.setdefault(fault.file, []).append(fault)
        written = []
        for name, found in by_file.items():
            with explained(self.root, name):
                if found[0].layer is None:
                    self._file(name)
                elif not (found := self._derivable(found)):
                    continue
                else:
                    self._rows(found[0].layer, found)
                written.append(name)
        return written

    def _derivable(self, faults: list[Fault]) -> list[Fault]:
        """Those of one row file that can be mended. Base rows that were not rounded weight by weight depend on a text
        and on all layers before them; their file's header does not."""
        if faults[0].rows == "native" or self.manifest.scheme == PLAIN_SCHEME:
            return faults
        header = [fault for fault in faults if fault.kind == "header"]
        self.left += [fault for fault in faults if fault.kind != "header"]
        return header

    def _rows(self, index: int, faults: Sequence[Fault]) -> None:
        """A file that is missing or of a wrong size as a whole, otherwise the bad header and rows in their
        place."""
        layer, kind = self.layers[index], faults[0].rows
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
            self._encode(layer, rows, kind, experts, lambda data, at: durable.pwrite_all(fd, data, at))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _encode(self, layer: Layer, rows: RowFile, kind: str, experts: Sequence[int], write: Write) -> None:
        if not experts:
            return
        encoder = RowEncoder(Geometries.of(self.checkpoint.expert(layer.index, 0)), kind == "native")

        def one(expert: int) -> None:
            _, base, native = encoder(self.checkpoint.expert(layer.index, expert))
            row = base if kind == "base" else native
            assert row is not None
            found = f"{crc32c(row):08x}"
            if found != rows.rows[expert]:
                what = f"layer {layer.index}, expert {expert}, {kind} row, crc32c"
                raise other_source(self.root, self.source, what, rows.rows[expert], found)
            write(row, rows.data_offset + expert * rows.row_bytes)

        workers = workers_that_fit(self.workers, self.checkpoint.expert_bytes(layer.index))
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, experts))

    def _file(self, name: str) -> None:
        wanted = self.manifest.files[name].blake3
        with TempFile(self.root, name) as out:
            if name in self.dense_shards:
                found = dense.copy(self.checkpoint, self.dense_shards[name], name, out).digest.blake3
            else:
                data = self._small_files().get(name, b"")
                found = blake3(data).hexdigest()
                out.write(data, 0)
            if found != wanted:
                raise other_source(self.root, self.source, f"{name}, blake3", wanted, found)
            out.commit()

    def _small_files(self) -> dict[str, bytes]:
        names = self.checkpoint.dense_names
        tensor_files = {tensor: file for file, shard in self.dense_shards.items() for tensor in names(shard)}
        total = sum(self.checkpoint.tensor_info(tensor).nbytes for tensor in tensor_files)
        return small_files(self.source.root, tensor_files, total)
