"""DST/.moet/journal.json: what a pack that is not finished yet already holds, so that a rerun goes on and
writes the same bytes."""

from pathlib import Path

import msgspec

from moet.errors import PackError
from moet.pack import durable
from moet.pack.fingerprint import TensorDigest
from moet.pack.manifest import FileDigest, Layer, Struct
from moet.quantize import RowReport

NAME = f"{durable.WORK}/journal.json"


class DenseFile(Struct):
    """A finished dense file: its digest, and the digests of its tensors for the fingerprint."""

    file: str
    digest: FileDigest
    tensors: tuple[TensorDigest, ...]


class Settings(Struct):
    """What decides the bytes of a pack: another value of any of them is another pack.

    names: blake3 of the config and of all tensor names (moet.pack.fingerprint.names)
    scheme: how the codes are chosen
    calibration: digest of the calibration windows, "" without
    """

    moet: int
    names: str
    native: bool
    scheme: str
    calibration: str


class LayerEntry(Struct):
    """first: digest of expert 0, with which a rerun checks cheaply that it reads the same source.
    source_bytes: what its experts were in the source."""

    layer: Layer
    sums: RowReport
    first: str
    source_bytes: int


class Journal(Struct):
    settings: Settings
    layers: dict[str, LayerEntry] = {}
    dense: dict[str, DenseFile] = {}

    def with_layer(self, entry: LayerEntry) -> "Journal":
        return msgspec.structs.replace(self, layers={**self.layers, str(entry.layer.index): entry})

    def with_dense(self, shard: str, entry: DenseFile) -> "Journal":
        return msgspec.structs.replace(self, dense={**self.dense, shard: entry})


def write(root: Path, journal: Journal) -> None:
    durable.write_whole(root, NAME, msgspec.json.encode(journal))


def load(root: Path, settings: Settings) -> Journal:
    """The journal of an earlier run with the same settings, or a new one.

    Raises PackError with both values if the earlier run had others.
    """
    try:
        journal = msgspec.json.decode((root / NAME).read_bytes(), type=Journal)
    except FileNotFoundError:
        return Journal(settings)
    except msgspec.DecodeError as e:
        raise PackError(
            f"{root / NAME}: expected the journal of this version, found: {e}. Delete {root} and pack again"
        ) from None
    refuse_other(root, journal.settings, settings)
    return journal


def refuse_other(root: Path, found: Settings, wanted: Settings) -> None:
    """Raises PackError that shows both values of the first setting that differs."""
    words = {
        "moet": "pack format",
        "names": "source fingerprint (config and tensor names)",
        "native": "native rows",
        "scheme": "scheme",
        "calibration": "calibration windows",
    }
    for field in Settings.__struct_fields__:
        have, want = getattr(found, field), getattr(wanted, field)
        if have != want:
            raise PackError(
                f"{root}: holds a pack with {words[field]} {_show(have)}, but this run has {_show(want)}. "
                "Use the source and the options it was started with, or another folder"
            )


def _show(value: object) -> str:
    return (
        {True: "yes (--native)", False: "no (--no-native)"}.get(value, str(value))
        if isinstance(value, bool)
        else str(value) or "none"
    )
