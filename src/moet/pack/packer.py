"""`moet pack`: checkpoint (a folder, complete or growing, or on the Hub) to pack folder.

Whatever ends a run, running it again goes on and gives the same bytes.
"""

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moet.checkpoint import Checkpoint, ShardSource
from moet.models import MoeLayer
from moet.pack import dense, durable, estimate, fingerprint, finish, lock, modelfiles, report, resume, space
from moet.pack import journal as journals
from moet.pack import manifest as manifests
from moet.pack.durable import TempFile, explained
from moet.pack.encoder import Encoder, Rounding
from moet.pack.journal import Settings
from moet.pack.layerwriter import workers_that_fit, write_layer
from moet.pack.manifest import Manifest
from moet.pack.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """What a run did. packed_bytes: source experts and dense tensors that this run took. resumed: an earlier
    run had finished some. was_finished: it had finished all."""

    manifest: Manifest
    seconds: float
    packed_bytes: int
    resumed: bool
    was_finished: bool = False


def pack(
    source: ShardSource,
    dst: Path,
    *,
    encoder: Encoder | None = None,
    native: bool = True,
    consume: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Packs `source` into the folder `dst`.

    encoder  how codes are chosen; None: every weight is rounded by itself
    native   also write the checkpoint's own experts as rows
    consume  call source.release(shard) once everything that came from the shard is on disk
    workers  experts in work at a time; None: one a core
    Raises PackError (locked, other settings, no space, not writable), CheckpointError (source),
    QuantizeError (values). Finished layers are kept.
    """
    dst = Path(dst)
    modelfiles.refuse_folders(source.root, dst)
    with lock.hold(dst), explained(dst, "the pack"):
        return _Run(source, dst, encoder or Rounding(), native, consume, workers, progress).run()


def rebuild(
    source: ShardSource, dst: Path, *, native: bool, workers: int | None, progress: Progress | None
) -> Outcome:
    """Makes a pack whose moet.json is lost again, file by file over the old ones. The caller holds the
    lock."""
    return _Run(source, dst, Rounding(), native, False, workers, progress).run(over=True)


class _Run:
    """One run under the lock."""

    def __init__(
        self,
        source: ShardSource,
        dst: Path,
        encoder: Encoder,
        native: bool,
        consume: bool,
        workers: int | None,
        progress: Progress | None,
    ) -> None:
        self.started = time.monotonic()
        self.source, self.dst, self.native, self.consume = source, dst, native, consume
        self.encoder = encoder
        self.held: set[str] = set()
        self.workers = workers or len(os.sched_getaffinity(0))
        self.progress = progress or Progress()
        self.packed = 0
        durable.sweep(dst)
        self.checkpoint = Checkpoint.open(source)
        names = fingerprint.names(self.checkpoint.config, self.checkpoint.names)
        calibration = encoder.calibration.digest if encoder.calibration else ""
        self.settings = Settings(manifests.FORMAT_VERSION, names, native, encoder.scheme, calibration)
        shards = self.checkpoint.dense_shards
        self.dense_names = {shard: dense.file_name(i, len(shards)) for i, shard in enumerate(shards, 1)}

    def run(self, over: bool = False) -> Outcome:
        """over: what is in the folder is the same pack, and is replaced."""
        if not over and (self.dst / manifests.NAME).exists():
            finished = manifests.read(self.dst)
            resume.refuse_other_settings(self.dst, finished, self.settings)
            lock.remove(self.dst)
            return Outcome(finished, time.monotonic() - self.started, 0, True, was_finished=True)
        resumed = self._begin(over)
        for layer in self.checkpoint.spec.layers:
            self._layer(layer)
        for shard in self.checkpoint.shards:
            self._dense(shard)
            self._release(shard)
        self.progress.stage("finishing")
        with explained(self.dst, "the pack's small files"):
            manifest = finish.write_rest(self.dst, self.checkpoint, self.journal, self.encoder.calibration)
        if self.consume:
            for shard in self.checkpoint.shards:
                self.checkpoint.release(shard)
        lock.remove(self.dst)
        return Outcome(manifest, time.monotonic() - self.started, self.packed, resumed)

    def _begin(self, over: bool) -> bool:
        """Everything that can be refused is refused here. Returns whether an earlier run had begun."""
        if not over:
            resume.refuse_other_contents(self.dst)
        found = journals.load(self.dst, self.settings)
        self.journal = resume.without_lost_files(self.dst, found)
        with explained(self.dst, "the journal"):
            journals.write(self.dst, self.journal)
        complete = all(map(self._at_hand, self.checkpoint.shards))
        if complete:
            self.checkpoint.check()
        modelfiles.copied(
            self.source.root
        )  # a name that cannot be packed shows now, not after the last layer
        resume.refuse_other_source(self.dst, self.journal, self.checkpoint, self._at_hand)
        plan = estimate.plan(self.checkpoint, self.journal, self.native, complete, self.encoder.row_format)
        replaced = sum(p.stat().st_size for p in self.dst.rglob("*.safetensors")) if over else 0
        sizes = {s: (self.source.root / s).stat().st_size for s in self.checkpoint.shards if self._at_hand(s)}
        same_disk = self.source.root.stat().st_dev == self.dst.stat().st_dev
        freed = estimate.freed(self.checkpoint, sizes, self.consume) if same_disk else 0
        need = dataclasses.replace(plan.need, scratch=self.encoder.scratch_bytes(self.checkpoint))
        space.check(self.dst, need, replaced + freed)
        self.progress.start(plan.source_total, plan.source_done)
        done = {entry.layer.index: entry.layer for entry in self.journal.layers.values()}
        self.encoder.begin(self.checkpoint, self.dst, done, self.progress)
        return bool(self.journal.layers or self.journal.dense)

    def _at_hand(self, shard: str) -> bool:
        """Whether a shard can be read without waiting for a download."""
        ready = getattr(self.source, "ready", None)
        return ready(shard) if ready else (self.source.root / shard).is_file()

    def _layer(self, layer: MoeLayer) -> None:
        if str(layer.index) in self.journal.layers:
            return
        shards = sorted(self.checkpoint.layer_shards(layer.index))
        for shard in shards:
            self._dense(shard)
        self._expect_next(shards)
        self.progress.stage(f"layer {layer.index}")
        size = self.checkpoint.expert_bytes(layer.index)
        workers = workers_that_fit(self.workers, size)
        with explained(self.dst, f"layer {layer.index}"), ThreadPoolExecutor(workers) as pool:
            entry = write_layer(
                self.checkpoint, layer, self.dst, self.native, self.encoder, pool, lambda: self._advance(size)
            )
            self.journal = self.journal.with_layer(entry)
            journals.write(self.dst, self.journal)
            self.encoder.written(entry.layer)
        if (
            self.encoder.calibration is None
        ):  # a code that makes up for other codes' errors is biased on purpose
            report.refuse_bias(self.journal.layers.values())
        for shard in sorted({*shards, *self.held}):
            self._release(shard)

    def _expect_next(self, shards: list[str]) -> None:
        """Lets a source that downloads on demand begin with the first shard after those of this layer."""
        expect = getattr(self.source, "expect", None)
        later = [s for s in self.checkpoint.shards if s > max(shards)]
        if expect and later and not self._taken(later[0]):
            expect(later[0])

    def _dense(self, shard: str) -> None:
        name = self.dense_names.get(shard)
        if name is None or shard in self.journal.dense:
            return
        self.source.fetch(shard)
        self.progress.stage(f"dense tensors of {shard}")
        with explained(self.dst, name), TempFile(self.dst, name) as out:
            entry = dense.copy(self.checkpoint, shard, name, out)
            out.commit()
            self.journal = self.journal.with_dense(shard, entry)
            journals.write(self.dst, self.journal)
        self._advance(entry.digest.bytes)

    def _release(self, shard: str) -> None:
        """Lets a shard go once nothing is left to take from it. Everything taken is fsynced by then."""
        if not self.consume or not (self.source.root / modelfiles.INDEX).exists():
            return  # without an index the names are in the shard's header only, and a rerun needs them
        if self._taken(shard) and self.encoder.holds(shard):
            self.held.add(shard)
        elif self._taken(shard):
            self.held.discard(shard)
            self.checkpoint.release(shard)

    def _taken(self, shard: str) -> bool:
        """Whether nothing of the shard is missing in the pack."""
        if shard in self.dense_names and shard not in self.journal.dense:
            return False
        waiting = [x.index for x in self.checkpoint.spec.layers if str(x.index) not in self.journal.layers]
        return not any(shard in self.checkpoint.layer_shards(index) for index in waiting)

    def _advance(self, count: int) -> None:
        self.packed += count
        self.progress.advance(count)
