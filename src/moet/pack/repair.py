"""`moet verify --repair`: what is bad is made again from the checkpoint; the rest is not touched."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet.checkpoint import Checkpoint, ShardSource
from moet.errors import PackError
from moet.layout import check_row, crc32c
from moet.pack import durable, lock, modelfiles, rowfile
from moet.pack import journal as journals
from moet.pack import manifest as manifests
from moet.pack.faults import Fault, Verdict
from moet.pack.layerwriter import Geometries, RowEncoder
from moet.pack.mend import Mender, other_source
from moet.pack.packer import rebuild
from moet.pack.progress import Progress
from moet.pack.verify import verify


@dataclass(frozen=True)
class Repaired:
    """`before`: what verify found. `rewritten`: the files that were written to, whole or in part. `left`: what the
    checkpoint alone does not give, base rows of a pack whose scheme is not PLAIN_SCHEME; `way`: what helps then."""

    before: Verdict
    rewritten: tuple[str, ...]
    left: tuple[Fault, ...] = ()
    way: str = ""


def repair(
    root: Path, source: ShardSource, *, workers: int | None = None, progress: Progress | None = None
) -> Repaired:
    """Verifies the pack `root` and mends it from `source`.

    If moet.json itself is damaged or lost, the pack is made again as a whole, provided that the rows which
    are
    intact by their own checksums come out the same. Raises PackError if `source` is not what the pack was
    made from;
    nothing that it gives differently is written.
    """
    root = Path(root)
    workers = workers or len(os.sched_getaffinity(0))
    modelfiles.refuse_folders(source.root, root)
    before = verify(root, workers=workers, progress=progress)
    if before.ok:
        return Repaired(before, ())
    with lock.hold(root), durable.explained(root, "the pack"):
        durable.sweep(root)
        if any(fault.kind == "manifest" for fault in before.faults):
            try:
                _refuse_other_rows(root, Checkpoint.open(source))
                native = any(root.glob("experts/native-*.safetensors"))
                rebuild(source, root, native=native, workers=workers, progress=progress)
            except BaseException:
                if not (root / journals.NAME).exists():
                    lock.remove(
                        root
                    )  # nothing was begun: the folder stays what it was, and can be repaired again
                raise
            return Repaired(before, ("every file",))
        try:
            manifest = manifests.read(root)
            mender = Mender(root, source, manifest, workers)
            rewritten = mender.mend(before.faults)
        finally:
            lock.remove(root)
    way = (
        f"{root}: the base rows of a {manifest.scheme} pack come from the checkpoint, a text and all layers before them, and "
        "cannot be made one by one. Copy the files from another copy of the pack, or pack again into another folder"
    )
    return Repaired(before, tuple(rewritten), tuple(mender.left), way if mender.left else "")


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
        if (format := rowfile.format_of(path)) != "sym2":
            raise PackError(
                f"{root}: {manifests.NAME} is damaged, and {path.name} holds {format} rows, which the checkpoint alone does not "
                f"give; copy {manifests.NAME} from another copy of the pack, or pack again into another folder"
            )
        weights = checkpoint.expert(layer.index, 0)
        encoder = RowEncoder(Geometries.of(weights), native=False)
        geometry = encoder.geometries.base
        if (shape := (layer.experts, geometry.row_bytes)) != (experts, row_bytes):
            raise other_source(root, checkpoint.source, f"{path.name}, shape", (experts, row_bytes), shape)
        row = np.fromfile(path, np.uint8, row_bytes, offset=offset)
        if check_row(geometry, row):
            continue
        compared += 1
        wanted, found = crc32c(row), crc32c(encoder(weights)[1])
        if wanted != found:
            raise PackError(
                f"{checkpoint.source.root}: is not what {root} was made from, or its rows were calibrated: {manifests.NAME} is "
                f"damaged, and layer {layer.index}, expert 0 has crc32c {wanted:08x} there, {found:08x} by rounding. Copy "
                f"{manifests.NAME} from another copy of the pack, repair from its own source, or pack again into another folder"
            )
    if not compared:
        raise PackError(
            f"{root}: {manifests.NAME} is damaged and no layer's first row is intact; "
            "delete the folder and pack again"
        )
