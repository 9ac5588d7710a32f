"""`moet pack`: checkpoint folder (complete, growing, or on the Hub) to pack folder. Whatever kills it,
running it again goes on and gives the same bytes."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moet.checkpoint import Checkpoint, ShardSource
from moet.errors import CheckpointError, PackError
from moet.models import MoeLayer
from moet.pack import dense, durable, estimate, fingerprint, lock, modelfiles, report, space
from moet.pack import journal as journals
from moet.pack import manifest as manifests
from moet.pack.durable import TempFile, explained
from moet.pack.journal import Journal, Settings
from moet.pack.layerwriter import workers_that_fit, write_layer
from moet.pack.manifest import ActivationInfo, Codebook, FileDigest, Manifest, Source
from moet.pack.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """What a run did. `packed_bytes` are bytes of source experts and dense tensors that this run read;
    `resumed` says that an earlier run had begun."""

    manifest: Manifest
    seconds: float
    packed_bytes: int
    resumed: bool
    was_finished: bool = False


def pack(
    source: ShardSource,
    dst: Path,
    *,
    native: bool = True,
    consume: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Packs `source` into the folder `dst`.

    native   also write the checkpoint's own experts as rows
    consume  call source.release(shard) once everything that came from the shard is on disk
    workers  experts in work at a time; None: one a core
    Raises PackError (locked, other settings, no space, not writable), CheckpointError (source),
    QuantizeError (values). Finished layers are kept.
    """
    dst = Path(dst)
    modelfiles.refuse_folders(source.root, dst)
    with lock.hold(dst):
        return _Run(
            source, dst, native, consume, workers or len(os.sched_getaffinity(0)), progress or Progress()
        ).run()


def rebuild(source: ShardSource, dst: Path, *, native: bool, workers: int, progress: Progress) -> Outcome:
    """Makes a pack whose moet.json is lost again, file by file over the old ones. The caller holds the
    lock."""
    return _Run(source, dst, native, False, workers, progress).run(over=True)


class _Run:
    def __init__(
        self, source: ShardSource, dst: Path, native: bool, consume: bool, workers: int, progress: Progress
    ) -> None:
        self.source, self.dst, self.native, self.consume, self.workers, self.progress = (
            source,
            dst,
            native,
            consume,
            workers,
            progress,
        )
        self.started = time.monotonic()
        self.packed = 0
        durable.sweep(dst)
        self.checkpoint = Checkpoint.open(source)
        names = fingerprint.names(self.checkpoint.config, self.checkpoint.names)
        self.settings = Settings(manifests.FORMAT_VERSION, names, native)

    def run(self, over: bool = False) -> Outcome:
        """over: what is in the folder is the same pack, and is replaced."""
        if not over and (self.dst / manifests.NAME).exists():
            found = manifests.read(self.dst)
            has_native = any(layer.native for layer in found.layers)
            journals.refuse_other(self.dst, Settings(found.moet, found.names, has_native), self.settings)
            lock.remove(self.dst)
            return Outcome(found, time.monotonic() - self.started, 0, True, was_finished=True)
        if not over:
            self._refuse_other_contents()
        self.journal = journals.load(self.dst, self.settings)
        resumed = bool(self.journal.layers or self.journal.dense)
        with explained(self.dst, "the journal"):
            journals.write(self.dst, self.journal)
        self._drop_lost_files()
        if self._all_there():
            self.checkpoint.check()
        self._refuse_other_source()
        self.dense_names = self._dense_file_names()
        self._preflight(sum(p.stat().st_size for p in self.dst.rglob("*.safetensors")) if over else 0)
        for layer in self.checkpoint.spec.layers:
            self._layer(layer)
        for shard in self.checkpoint.shards:
            self._dense(shard)
            self._release(shard)
        manifest = self._finish()
        if self.consume:
            for shard in self.checkpoint.shards:
                self.checkpoint.release(shard)
        lock.remove(self.dst)
        return Outcome(manifest, time.monotonic() - self.started, self.packed, resumed)

    # What is there already

    def _refuse_other_contents(self) -> None:
        others = [p.name for p in self.dst.iterdir() if p.name != durable.WORK]
        if others and not (self.dst / journals.NAME).exists():
            raise PackError(
                f"{self.dst}: expected an empty folder or an unfinished pack, found {', '.join(sorted(others)[:5])}. Choose another folder"
            )

    def _drop_lost_files(self) -> None:
        """Forgets what the journal names and the folder does not have in its full size."""

        def there(name: str, size: int) -> bool:
            path = self.dst / name
            return path.is_file() and path.stat().st_size == size

        layers = {
            key: entry for key, entry in self.journal.layers.items()
            if all(there(rows.file, rows.bytes) for rows in (entry.layer.base, entry.layer.native) if rows)
        }  # fmt: skip
        files = {
            shard: entry
            for shard, entry in self.journal.dense.items()
            if there(entry.file, entry.digest.bytes)
        }
        self.journal = Journal(self.journal.settings, layers, files)

    def _refuse_other_source(self) -> None:
        """The first expert of every finished layer must still be what it was, where its shard is at hand
        without a download."""
        for entry in self.journal.layers.values():
            index = entry.layer.index
            if not all(self._at_hand(shard) for shard in self.checkpoint.layer_shards(index)):
                continue
            found = fingerprint.expert(self.checkpoint.expert(index, 0))
            if found != entry.first:
                raise PackError(
                    f"{self.dst}: was begun from another source: layer {index}, expert 0 had fingerprint {entry.first}, {self.source.root} has {found}. "
                    "Use the source it was started with, or another folder"
                )

    def _at_hand(self, shard: str) -> bool:
        return (self.source.root / shard).is_file()

    def _all_there(self) -> bool:
        ready: Callable[[str], bool] = getattr(self.source, "ready", self._at_hand)
        return all(ready(shard) for shard in self.checkpoint.shards)

    def _dense_file_names(self) -> dict[str, str]:
        shards = self.checkpoint.dense_shards
        return {shard: dense.file_name(i, len(shards)) for i, shard in enumerate(shards, 1)}

    def _preflight(self, replaced: int) -> None:
        plan = estimate.plan(self.checkpoint, self.journal, self.native, exact=self._all_there())
        space.check(self.dst, plan.need, replaced + self._freed(plan.need.base + plan.need.native))
        self.progress.start(plan.source_total, plan.source_done)

    def _freed(self, written: int) -> int:
        """With --consume on one file system the source's bytes come back, but for what is in work: two
        shards and a layer."""
        if not self.consume or self.source.root.stat().st_dev != self.dst.stat().st_dev:
            return 0
        sizes = [(self.source.root / s).stat().st_size for s in self.checkpoint.shards if self._at_hand(s)]
        in_work = 2 * max(sizes, default=0) + written // max(1, len(self.checkpoint.spec.layers))
        return max(0, sum(sizes) - in_work)

    # Work

    def _layer(self, layer: MoeLayer) -> None:
        if str(layer.index) in self.journal.layers:
            return
        shards = sorted(self.checkpoint.layer_shards(layer.index))
        for shard in shards:
            self._dense(shard)
        self.progress.stage(f"layer {layer.index}")
        size = self.checkpoint.expert_bytes(layer.index)
        with (
            explained(self.dst, f"layer {layer.index}"),
            ThreadPoolExecutor(workers_that_fit(self.workers, size)) as pool,
        ):
            entry = write_layer(
                self.checkpoint,
                layer,
                self.dst,
                native=self.native,
                pool=pool,
                advance=lambda: self._advance(size),
            )
            self.journal = self.journal.with_layer(entry)
            journals.write(self.dst, self.journal)
        report.refuse_bias(self.journal.layers.values())
        for shard in shards:
            self._release(shard)

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
        has_index = (
            self.source.root / modelfiles.INDEX
        ).exists()  # without it a rerun needs the shard's header to know the names
        if (
            not self.consume
            or not has_index
            or (shard in self.dense_names and shard not in self.journal.dense)
        ):
            return
        for layer in self.checkpoint.spec.layers:
            if str(layer.index) not in self.journal.layers and shard in self.checkpoint.layer_shards(
                layer.index
            ):
                return
        self.checkpoint.release(shard)

    def _advance(self, count: int) -> None:
        self.packed += count
        self.progress.advance(count)

    # The end

    def _finish(self) -> Manifest:
        """Small files, index, and moet.json last."""
        self.progress.stage("finishing")
        spec = self.checkpoint.spec
        small = self._small_files()
        entries = [self.journal.layers[str(layer.index)] for layer in spec.layers]
        files = {d.file: d.digest for d in self.journal.dense.values()}
        files |= {name: FileDigest(len(data), fingerprint.blake3(data).hexdigest()) for name, data in small}
        tensors = [t for d in self.journal.dense.values() for t in d.tensors]
        manifest = Manifest(
            moet=manifests.FORMAT_VERSION,
            fingerprint=fingerprint.whole(
                self.settings.names, [(e.layer.index, e.layer.source) for e in entries], tensors
            ),
            names=self.settings.names,
            source=Source(spec.architecture, str(self.checkpoint.config.get("_name_or_path") or "")),
            hidden=spec.hidden,
            inter=max(e.layer.inter for e in entries),
            top_k=spec.top_k,
            activation=ActivationInfo(spec.activation.kind, spec.activation.limit, spec.activation.alpha),
            codebook=Codebook(),
            layers=tuple(e.layer for e in entries),
            files=files,
            report=report.summary(entries, sum(d.digest.bytes for d in self.journal.dense.values())),
        )
        with explained(self.dst, "the pack's small files"):
            for name, data in small:
                durable.write_whole(self.dst, name, data)
            durable.write_whole(self.dst, manifests.NAME, manifests.encode(manifest))
        return manifests.read(self.dst)

    def _small_files(self) -> list[tuple[str, bytes]]:
        return small_files(
            self.source.root,
            {t.name: d.file for d in self.journal.dense.values() for t in d.tensors},
            sum(t.nbytes for d in self.journal.dense.values() for t in d.tensors),
        )


def small_files(root: Path, tensor_files: dict[str, str], total_size: int) -> list[tuple[str, bytes]]:
    """(name, bytes) of every file of the pack that is neither rows nor dense tensors nor moet.json."""
    try:
        config = (root / modelfiles.CONFIG).read_bytes()
        copies = [(name, (root / name).read_bytes()) for name in modelfiles.copied(root)]
    except OSError as e:
        raise CheckpointError(f"{e.filename}: expected a readable file, found: {e.strerror}") from e
    return [
        (modelfiles.CONFIG, modelfiles.pack_config(config, (root / "hf_quant_config.json").exists())),
        (modelfiles.INDEX, modelfiles.index_json(tensor_files, total_size)),
        *copies,
    ]
