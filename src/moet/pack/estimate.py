"""How large a pack will be and how much of the work is done, before it is made."""

from dataclasses import dataclass

from moet.checkpoint.reader import Checkpoint
from moet.pack.journal import Journal
from moet.pack.layerwriter import Geometries
from moet.pack.rowfile import ALIGN
from moet.pack.space import Need


@dataclass(frozen=True)
class Plan:
    """`need`: bytes of the pack. source_total, source_done: bytes of the source that go into it, and those that an earlier run has taken."""

    need: Need
    source_total: int
    source_done: int


def plan(checkpoint: Checkpoint, journal: Journal, native: bool, exact: bool) -> Plan:
    """`exact`: all shards are there. Otherwise all layers are taken to be like the first one that is not finished, and the dense tensors are what the
    index's total size leaves after the experts."""
    base = native_bytes = experts = present = done = 0
    like: Geometries | None = None
    for layer in checkpoint.spec.layers:
        if entry := journal.layers.get(str(layer.index)):
            base += entry.layer.base.bytes
            native_bytes += entry.layer.native.bytes if entry.layer.native else 0
            experts += entry.source_bytes
            done += entry.source_bytes
            continue
        if like is None or exact:
            like = Geometries.of(checkpoint.expert(layer.index, 0))
        base += ALIGN + layer.experts * like.base.row_bytes
        native_bytes += (ALIGN + layer.experts * like.native.row_bytes) * native
        experts += layer.experts * like.source_bytes
    present = sum(f.bytes for e in journal.layers.values() for f in (e.layer.base, e.layer.native) if f)
    dense_done = sum(e.digest.bytes for e in journal.dense.values())
    if exact:
        dense = sum(checkpoint.tensor_info(name).nbytes for shard in checkpoint.shards for name in checkpoint.dense_names(shard))
    else:
        dense = max(dense_done, checkpoint.total_size - experts)
    return Plan(Need(base, native_bytes, dense, present + dense_done), experts + dense, done + dense_done)
