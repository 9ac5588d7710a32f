"""How large a pack will be and how much of the work is done, before it is made."""

import json
from dataclasses import dataclass
from pathlib import Path

from moet.checkpoint import Checkpoint
from moet.layout import RowGeometry
from moet.models import MoeLayer
from moet.pack.journal import Journal
from moet.pack.modelfiles import INDEX
from moet.pack.rowfile import ALIGN
from moet.pack.space import Need


@dataclass(frozen=True)
class Plan:
    """`need`: bytes of the pack. source_total, source_done: bytes of the source that go into it, and those
    that an earlier run has taken."""

    need: Need
    source_total: int
    source_done: int


def plan(
    checkpoint: Checkpoint, journal: Journal, native: bool, exact: bool, row_format: str = "sym2"
) -> Plan:
    """`exact`: all shards are there. Otherwise all layers are taken to be like the first one that is not
    finished, and the dense tensors are what the
    index's total size leaves after the experts."""
    base = native_bytes = experts = done = 0
    like: MoeLayer | None = None
    for layer in checkpoint.spec.layers:
        if entry := journal.layers.get(str(layer.index)):
            base += entry.layer.base.bytes
            native_bytes += entry.layer.native.bytes if entry.layer.native else 0
            experts += entry.source_bytes
            done += entry.source_bytes
            continue
        if like is None or exact:
            like = layer
        base += _file_bytes(checkpoint, layer, like, row_format)
        if native:
            native_bytes += _file_bytes(checkpoint, layer, like, checkpoint.native_format(like.index))
        experts += layer.experts * checkpoint.expert_bytes(like.index)
    present = sum(f.bytes for e in journal.layers.values() for f in (e.layer.base, e.layer.native) if f)
    dense_done = sum(e.digest.bytes for e in journal.dense.values())
    if exact:
        dense = sum(
            checkpoint.tensor_info(name).nbytes
            for shard in checkpoint.dense_shards
            for name in checkpoint.dense_names(shard)
        )
    else:
        dense = max(dense_done, _total_size(checkpoint.root) - experts)
    return Plan(Need(base, native_bytes, dense, present + dense_done), experts + dense, done + dense_done)


def freed(checkpoint: Checkpoint, at_hand: dict[str, int], consume: bool) -> int:
    """Bytes that the source gives back while packing, if it is on the same disk; negative: that it takes.

    at_hand: sizes of the shards that are there. Shards still to come need room too. With `consume` all of
    them
    go again, but for what is in work: two shards.
    """
    there = sum(at_hand.values())
    to_come = max(0, _total_size(checkpoint.root) - there) if len(at_hand) < len(checkpoint.shards) else 0
    if not consume:
        return -to_come
    return there - min(there + to_come, 2 * (there + to_come) // len(checkpoint.shards))


def _file_bytes(checkpoint: Checkpoint, layer: MoeLayer, like: MoeLayer, format: str) -> int:
    return (
        ALIGN
        + layer.experts
        * RowGeometry(format, checkpoint.spec.hidden, layer.inter, checkpoint.biased(like.index)).row_bytes
    )


def _total_size(root: Path) -> int:
    """What the index says about the size of all tensors; 0 if it says nothing."""
    try:
        return int(json.loads((root / INDEX).read_text())["metadata"]["total_size"])
    except (OSError, KeyError, TypeError, ValueError):
        return 0
