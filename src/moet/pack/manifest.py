"""moet.json: what is in a pack and the digest of every byte of it. Written in one canonical form, so that
any changed byte shows."""

import re
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from moet.errors import PackError
from moet.numerics import TCQ2_LEVELS

FORMAT_VERSION = 2
NAME = "moet.json"


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every object in moet.json: immutable, and a field that this version does not know is an
    error."""


class Source(Struct):
    """The checkpoint that was packed: its first `architectures` entry, and config.json's `_name_or_path` (""
    if it has none)."""

    architecture: str
    name: str


class ActivationInfo(Struct):
    """See moet.models.Activation."""

    kind: str
    limit: float | None
    alpha: float


class Codebook(Struct):
    """What a code and a scale byte of the base rows mean (docs/row-format.md), one byte per `group` values along K.

    values  sym2: of code 0 to 3; tcq2: of a code + 4 times the next one
    scale   ue8m0: 2^(byte - 127); ue5m3: of `tcq2`
    """

    values: tuple[int, ...]
    scale: str
    group: int


CODEBOOKS = {
    "sym2": Codebook((-4, -1, 1, 4), "ue8m0", 32),
    "tcq2": Codebook(tuple(int(x) for x in TCQ2_LEVELS), "ue5m3", 32),
}
"""By the format of base rows."""


class Calibration(Struct):
    """The text that an encoder looked at. digest: blake3 of its token windows (moet.calibrate.tokens.Windows); tokens:
    how many; window: tokens that were seen together."""

    digest: str
    tokens: int
    window: int


class LayerCalibration(Struct):
    """What calibration did to one layer.

    tokens_min, tokens_median  tokens routed to an expert
    fallback      experts whose own tokens weighed less than the layer's shared statistics
    output_error  by expert, relative RMS error of its answers on those tokens: |2-bit - native| / |native|; 0 without
                  tokens. 5 significant digits
    """

    tokens_min: int
    tokens_median: int
    fallback: int
    output_error: tuple[float, ...]


class RowFile(Struct):
    """One safetensors file of rows.

    data_offset  first byte of row 0, a multiple of 4096
    header       blake3 (hex) of the bytes before data_offset
    scale_dtype  the checkpoint's dtype of the scales ("" if it had none, or for base rows)
    rows         crc32c of each whole row, 8 hex digits, by expert
    """

    file: str
    data_offset: int
    format: str
    row_bytes: int
    header: str
    scale_dtype: str
    rows: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.data_offset + len(self.rows) * self.row_bytes


class ProjectionReport(Struct):
    """Per expert, of one projection: relative RMS error |q - v| / |v|, and sign bias, the mean of (q - v) /
    2^e. 5 significant digits.

    alternated  experts whose zeros were all of one sign, so that their signs alternate by column
    """

    error: tuple[float, ...]
    bias: tuple[float, ...]
    alternated: int


class LayerReport(Struct):
    gate: ProjectionReport
    up: ProjectionReport
    down: ProjectionReport


class Layer(Struct):
    """source: blake3 of the layer's experts as the checkpoint stores them (moet.pack.fingerprint)."""

    index: int
    prefix: str
    experts: int
    inter: int
    mtp: bool
    biased: bool
    source: str
    base: RowFile
    native: RowFile | None
    report: LayerReport
    calibration: LayerCalibration | None


class FileDigest(Struct):
    """Every other file of the pack: its size and its plain blake3 (hex)."""

    bytes: int
    blake3: str


class ProjectionSummary(Struct):
    """Over all experts of all layers: error = sqrt(sum (q-v)^2 / sum v^2), bias = mean of (q-v)/2^e,
    mean_abs_bias = mean over matrices of |bias|."""

    error: float
    bias: float
    mean_abs_bias: float


class Report(Struct):
    """weights: routed expert weights. base_bits, native_bits: bits a weight of the row files, headers and
    padding counted."""

    weights: int
    base_bits: float
    native_bits: float
    base_bytes: int
    native_bytes: int
    dense_bytes: int
    gate: ProjectionSummary
    up: ProjectionSummary
    down: ProjectionSummary


class Manifest(Struct):
    """The whole of moet.json. scheme: how the codes were chosen (moet.pack.encoder). calibration: None if only the weights
    were looked at. `digest` is the blake3 of the canonical form with an empty digest."""

    moet: int
    fingerprint: str
    names: str
    source: Source
    hidden: int
    inter: int
    top_k: int
    activation: ActivationInfo
    codebook: Codebook
    scheme: str
    calibration: Calibration | None
    layers: tuple[Layer, ...]
    files: dict[str, FileDigest]
    report: Report
    digest: str = ""


def encode(manifest: Manifest) -> bytes:
    """The canonical bytes: fields in declaration order, files by name, no spaces, shortest floats, the
    digest filled in, one newline."""
    ordered = msgspec.structs.replace(manifest, files=dict(sorted(manifest.files.items())), digest="")
    digest = blake3(msgspec.json.encode(ordered)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(ordered, digest=digest)) + b"\n"


def decode(data: bytes, path: Path | str = NAME) -> Manifest:
    """Raises PackError: not JSON, another format version (named, with the way out), or not the canonical
    bytes (damaged)."""
    again = "`moet verify PACK --repair SRC` rewrites it"
    try:
        version = version_of(data)
    except msgspec.DecodeError as e:
        raise PackError(f"{path}: expected a moet.json, found damaged JSON ({e}); {again}") from None
    if version != FORMAT_VERSION and not is_damaged_version(data):
        way = (
            "a newer moet reads it"
            if isinstance(version, int) and version > FORMAT_VERSION
            else "pack the checkpoint again with this moet"
        )
        raise PackError(f"{path}: expected pack format {FORMAT_VERSION}, found format {version}; {way}")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as e:
        raise PackError(
            f"{path}: expected the fields of pack format {FORMAT_VERSION}, found: {e}; {again}"
        ) from None
    if encode(manifest) != data:
        raise PackError(
            f"{path}: expected digest {manifest.digest or 'none'} and canonical bytes, "
            f"found a file that was changed; {again}"
        )
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path | str) -> None:
    """What the fields' types do not say. A pack may come from anywhere: no name may lead out of its folder."""
    rows = [(layer, file) for layer in manifest.layers for file in (layer.base, layer.native) if file]
    for name in (*manifest.files, *(file.file for _, file in rows)):
        if not name or name.startswith("/") or {"", ".", ".."} & set(name.split("/")) or "\0" in name:
            raise PackError(f"{path}: expected names of files inside the pack, found {name!r}")
    for layer, file in rows:
        if len(file.rows) != layer.experts or not all(re.fullmatch("[0-9a-f]{8}", crc) for crc in file.rows):
            raise PackError(
                f"{path}, {file.file}: expected a crc32c of 8 hex digits for each of {layer.experts} experts, "
                f"found {len(file.rows)} checksums"
            )
    indices = [layer.index for layer in manifest.layers]
    if not indices or indices != sorted(set(indices)):
        raise PackError(f"{path}: expected layers in ascending order, each once, found {indices}")


def is_damaged_version(data: bytes) -> bool:
    """Whether this is a moet.json of this version in which only the version's own digits were changed:
    damage, not another format."""
    mended = re.sub(rb'^\{"moet":[^,]*,', b'{"moet":%d,' % FORMAT_VERSION, data, count=1)
    try:
        return mended != data and encode(msgspec.json.decode(mended, type=Manifest)) == mended
    except msgspec.DecodeError:
        return False


def version_of(data: bytes) -> Any:
    """What `moet` says in a moet.json of any version. Raises msgspec.DecodeError if it is no JSON object."""
    return msgspec.json.decode(data, type=_Version).moet


def read(root: Path) -> Manifest:
    """The manifest of the pack folder `root`. Raises PackError that says what the folder is instead, and the
    way out."""
    path = root / NAME
    try:
        return decode(path.read_bytes(), path)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise PackError(f"{path}: expected a readable file, found: {e.strerror}") from None
    if not root.is_dir():
        raise PackError(
            f"{root}: expected a pack folder, found {'a file' if root.exists() else 'nothing there'}"
        )
    if (root / ".moet").is_dir():
        raise PackError(
            f"{root}: expected a pack, found an unfinished one (no {NAME}); "
            "run `moet pack` again, it goes on where it stopped"
        )
    hint = (
        "; it looks like a checkpoint: `moet pack SRC DST` makes a pack of it"
        if (root / "config.json").exists()
        else ""
    )
    raise PackError(f"{root}: expected a pack, found a folder without {NAME}{hint}")


class _Version(msgspec.Struct):
    moet: Any = None
