"""What an earlier run left in the folder: what of it counts, and whether it belongs to this run."""

from collections.abc import Callable
from pathlib import Path

from moet.checkpoint import Checkpoint
from moet.errors import PackError
from moet.pack import durable, fingerprint
from moet.pack import journal as journals
from moet.pack.journal import Journal
from moet.pack.manifest import Manifest


def refuse_other_contents(root: Path) -> None:
    """Raises PackError if the folder has files and no journal: they are not ours to write beside."""
    others = sorted(p.name for p in root.iterdir() if p.name != durable.WORK)
    if others and not (root / journals.NAME).exists():
        raise PackError(
            f"{root}: expected an empty folder or an unfinished pack, found {', '.join(others[:5])}. "
            "Choose another folder"
        )


def refuse_other_settings(root: Path, finished: Manifest, settings: journals.Settings) -> None:
    """Raises PackError if the finished pack in `root` is not the one that this run would make."""
    native = any(layer.native for layer in finished.layers)
    calibration = finished.calibration.digest if finished.calibration else ""
    found = journals.Settings(finished.moet, finished.names, native, finished.scheme, calibration)
    journals.refuse_other(root, found, settings)


def without_lost_files(root: Path, journal: Journal) -> Journal:
    """The journal less what the folder does not have in its full size."""

    def there(name: str, size: int) -> bool:
        path = root / name
        return path.is_file() and path.stat().st_size == size

    def whole(layer) -> bool:
        return all(there(rows.file, rows.bytes) for rows in (layer.base, layer.native) if rows)

    layers = {key: entry for key, entry in journal.layers.items() if whole(entry.layer)}
    files = {shard: d for shard, d in journal.dense.items() if there(d.file, d.digest.bytes)}
    return Journal(journal.settings, layers, files)


def refuse_other_source(
    root: Path, journal: Journal, checkpoint: Checkpoint, at_hand: Callable[[str], bool]
) -> None:
    """Raises PackError unless expert 0 of every finished layer still is what it was. A layer whose shards
    are not all at hand (not downloaded, or used up) is left out: fetching them would undo what resuming
    saves.
    """
    for entry in journal.layers.values():
        index = entry.layer.index
        if not all(map(at_hand, checkpoint.layer_shards(index))):
            continue
        found = fingerprint.expert(checkpoint.expert(index, 0))
        if found != entry.first:
            raise PackError(
                f"{root}: was begun from another source: layer {index}, expert 0 had fingerprint "
                f"{entry.first}, {checkpoint.root} has {found}. Use the source it was started with, "
                "or another folder"
            )
