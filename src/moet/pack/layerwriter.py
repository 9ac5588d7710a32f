"""One layer: its experts are read, hashed, encoded and written at their row's offset by a few workers, then
both files appear at once.

Each worker takes an expert through all steps: read, encode, checksum and write release the GIL, nothing is
handed from thread to thread, and
no more experts are in memory than there are workers.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from moet.checkpoint import Checkpoint, ExpertWeights
from moet.errors import CheckpointError
from moet.layout import RowGeometry, crc32c, pack_row
from moet.models import MoeLayer
from moet.pack import fingerprint, report, rowfile
from moet.pack.durable import TempFile, start_writeback
from moet.pack.encoder import EncodeExpert, Encoder, encode_expert
from moet.pack.journal import LayerEntry
from moet.pack.manifest import Layer, RowFile
from moet.quantize import RowReport

WORKING_SET = 512 << 20
"""Memory for experts in work: half of the 1 GiB that packing may be resident."""


@dataclass(frozen=True)
class Geometries:
    """The row geometries of a layer, taken from one of its experts."""

    base: RowGeometry
    native: RowGeometry
    scale_dtype: str

    @classmethod
    def of(cls, weights: ExpertWeights, row_format: str = "sym2") -> "Geometries":
        hidden, inter, biased = weights.gate.cols, weights.gate.rows, weights.gate.bias is not None
        native = weights.gate.format
        return cls(
            RowGeometry(row_format, hidden, inter, biased),
            RowGeometry(native, hidden, inter, biased),
            weights.gate.scale_dtype,
        )


@dataclass(frozen=True)
class Encoded:
    """What is kept of an expert once its rows are written."""

    source: str
    report: RowReport
    base: str
    native: str


class RowEncoder:
    """Native expert to base row and native row, in buffers that each thread keeps."""

    def __init__(self, geometries: Geometries, native: bool) -> None:
        self.geometries, self.native = geometries, native
        self._local = threading.local()

    def __call__(
        self, weights: ExpertWeights, encode: EncodeExpert = encode_expert
    ) -> tuple[RowReport, np.ndarray, np.ndarray | None]:
        """The views are valid until this thread's next call. Raises CheckpointError if the expert is not
        like its layer's first."""
        g = self.geometries
        if (found := Geometries.of(weights, g.base.format)) != g:
            raise CheckpointError(
                f"layer {weights.layer}, expert {weights.expert}: expected {g.native}, "
                f"scales {g.scale_dtype or 'none'}, like expert 0, found {found.native}, scales {found.scale_dtype or 'none'}"
            )
        base = self._buffer("base", g.base.row_bytes)
        row_report = encode(weights, base)
        if not self.native:
            return row_report, base, None
        native = self._buffer("native", g.native.row_bytes)
        pack_row(g.native, weights.gate, weights.up, weights.down, native)
        return row_report, base, native

    def _buffer(self, name: str, size: int) -> np.ndarray:
        if not hasattr(self._local, name):
            setattr(self._local, name, np.zeros(size, np.uint8))
        return getattr(self._local, name)


def workers_that_fit(workers: int, expert_bytes: int) -> int:
    """At most `workers`, at least one, so that experts in work stay within WORKING_SET: each is there as
    read, as native row and as base row."""
    return max(1, min(workers, WORKING_SET // (3 * expert_bytes)))


def write_layer(
    checkpoint: Checkpoint,
    layer: MoeLayer,
    root: Path,
    native: bool,
    encoder: Encoder,
    pool: ThreadPoolExecutor,
    advance: Callable[[], None],
) -> LayerEntry:
    """Writes the row files of one layer and makes them appear; the journal is the caller's. `advance` is
    called once an expert."""
    g = Geometries.of(checkpoint.expert(layer.index, 0), encoder.row_format)
    rows = RowEncoder(g, native)
    with contextlib.ExitStack() as stack:
        kinds = [("base", g.base)] + [("native", g.native)] * native
        files = {
            kind: stack.enter_context(TempFile(root, rowfile.file_name(kind, layer.index)))
            for kind, _ in kinds
        }
        heads = {
            kind: rowfile.header(layer.index, geo.format, layer.experts, geo.row_bytes) for kind, geo in kinds
        }

        def put(kind: str, expert: int, row: np.ndarray) -> str:
            offset = len(heads[kind]) + expert * row.nbytes
            files[kind].write(row, offset)
            start_writeback(files[kind].fd, offset, row.nbytes)
            return f"{crc32c(row):08x}"

        def one(expert: int, encode: EncodeExpert) -> Encoded:
            weights = checkpoint.expert(layer.index, expert)
            row_report, base, native_row = rows(weights, encode)
            return Encoded(
                fingerprint.expert(weights),
                row_report,
                put("base", expert, base),
                "" if native_row is None else put("native", expert, native_row),
            )

        for kind, head in heads.items():
            files[kind].write(head, 0)
        done = []
        for batch in encoder.batches(layer):
            done += _in_order([pool.submit(one, e, batch.encode) for e in batch.experts], advance)
        for file in files.values():
            file.commit()

    def row_file(kind: str, geo: RowGeometry, sums: tuple[str, ...]) -> RowFile:
        scale_dtype = g.scale_dtype if kind == "native" else ""
        head = heads[kind]
        return RowFile(
            rowfile.file_name(kind, layer.index),
            len(head),
            geo.format,
            geo.row_bytes,
            blake3(head).hexdigest(),
            scale_dtype,
            sums,
        )

    reports = [d.report for d in done]
    entry = Layer(
        index=layer.index,
        prefix=layer.prefix,
        experts=layer.experts,
        inter=g.base.inter,
        mtp=layer.mtp,
        biased=g.base.biased,
        source=fingerprint.layer(d.source for d in done),
        base=row_file("base", g.base, tuple(d.base for d in done)),
        native=row_file("native", g.native, tuple(d.native for d in done)) if native else None,
        report=report.layer_report(reports),
        calibration=encoder.report(layer.index),
    )
    source_bytes = layer.experts * checkpoint.expert_bytes(layer.index)
    return LayerEntry(entry, report.merged(reports), done[0].source, source_bytes)


def _in_order(futures: list[Future[Encoded]], advance: Callable[[], None]) -> list[Encoded]:
    """All results. After a failure nothing new starts, and what runs is waited for: it still writes to the
    files that are about to be closed."""
    try:
        results = []
        for future in futures:
            results.append(future.result())
            advance()
        return results
    except BaseException:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()
        raise
