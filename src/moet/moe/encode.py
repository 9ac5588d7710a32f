"""Rows made from a checkpoint on arrival, straight into an arena that holds all of them: serving without a pack."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

import numpy as np

from moet.checkpoint import Checkpoint, ExpertWeights
from moet.errors import StoreError
from moet.layout import RowGeometry, pack_row
from moet.quantize import RowReport, check_bias, encode_row
from moet.store import Pager, RowSource


def row_sources(checkpoint: Checkpoint, precision: str) -> dict[int, RowSource]:
    """A layer's index -> its rows without a file. precision: `base` (sym2) or `native` (the checkpoint's own format)."""
    sources = {}
    for layer in checkpoint.spec.layers:
        format = "sym2" if precision == "base" else checkpoint.native_format(layer.index)
        sources[layer.index] = RowSource(RowGeometry(format, checkpoint.spec.hidden, layer.inter, checkpoint.biased(layer.index)), layer.experts)
    return sources


def slice_bytes(sources: dict[int, RowSource], rank: int, world: int) -> int:
    """Bytes of all rows' slices of one rank."""
    return sum(s.experts * s.geometry.slice(rank, world).nbytes for s in sources.values())


def check_room(sources: dict[int, RowSource], budget_bytes: int, rank: int, world: int) -> None:
    """Raises StoreError if the rows, which cannot be read again, do not fit the budget (0: any)."""
    needed = slice_bytes(sources, rank, world)
    if budget_bytes and needed > budget_bytes:
        raise StoreError(
            f"experts of the checkpoint: expected room for all their rows, {needed} bytes a rank, found a budget of {budget_bytes}. "
            "Raise ram_gib, or make a pack with `moet pack`, whose rows are read when they are needed"
        )


def put_all(checkpoint: Checkpoint, sources: dict[int, RowSource], pager: Pager, threads: int) -> RowReport:
    """Encodes every expert into the pager; reading is in order, `threads` encode. Returns the error report of 2-bit rows.

    At most 2 * threads experts of source are in memory. Raises CheckpointError or QuantizeError, also for a model that 2 bits would bias.
    """
    room = Semaphore(2 * threads)

    def one(expert: ExpertWeights) -> RowReport:
        try:
            geometry = sources[expert.layer].geometry
            row = np.empty(geometry.row_bytes, np.uint8)
            report = RowReport()
            if geometry.format == "sym2":
                report = encode_row(geometry, expert, row)
            else:
                pack_row(geometry, expert.gate, expert.up, expert.down, row)
            pager.put(expert.layer, expert.expert, row)
            return report
        finally:
            room.release()

    def experts() -> Iterable[ExpertWeights]:
        for layer in sources:
            yield from checkpoint.experts(layer)

    with ThreadPoolExecutor(threads) as pool:
        futures = []
        for expert in experts():
            room.acquire()
            futures.append(pool.submit(one, expert))
            if futures[0].done():
                futures[0].result()   # a failure ends the reading early
    report = sum((f.result() for f in futures), RowReport())
    check_bias(report.total)
    return report
