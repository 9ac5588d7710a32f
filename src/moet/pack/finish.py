"""The end of packing: from a full journal to the small files and moet.json."""

from pathlib import Path

from blake3 import blake3

from moet.checkpoint import Checkpoint
from moet.errors import CheckpointError
from moet.pack import durable, fingerprint, modelfiles, report
from moet.pack import manifest as manifests
from moet.pack.journal import Journal
from moet.pack.manifest import ActivationInfo, Calibration, FileDigest, Manifest, Source


def write_rest(
    root: Path, checkpoint: Checkpoint, journal: Journal, calibration: Calibration | None
) -> Manifest:
    """Writes config, index and copied files, then moet.json, and returns what a reader finds in it."""
    tensor_files = {t.name: dense.file for dense in journal.dense.values() for t in dense.tensors}
    total_size = sum(t.nbytes for dense in journal.dense.values() for t in dense.tensors)
    small = small_files(checkpoint.root, tensor_files, total_size)
    for name, data in small.items():
        durable.write_whole(root, name, data)
    manifest = _manifest(checkpoint, journal, small, calibration)
    durable.write_whole(root, manifests.NAME, manifests.encode(manifest))
    return manifests.read(root)


def small_files(source: Path, tensor_files: dict[str, str], total_size: int) -> dict[str, bytes]:
    """Every file of the pack that is neither rows nor dense tensors nor moet.json, by name."""
    try:
        config = (source / modelfiles.CONFIG).read_bytes()
        copies = {name: (source / name).read_bytes() for name in modelfiles.copied(source)}
    except OSError as e:
        raise CheckpointError(f"{e.filename}: expected a readable file, found: {e.strerror}") from e
    has_hf_quant_config = (source / "hf_quant_config.json").exists()
    return copies | {
        modelfiles.CONFIG: modelfiles.pack_config(config, has_hf_quant_config),
        modelfiles.INDEX: modelfiles.index_json(tensor_files, total_size),
    }


def _manifest(
    checkpoint: Checkpoint, journal: Journal, small: dict[str, bytes], calibration: Calibration | None
) -> Manifest:
    spec = checkpoint.spec
    entries = [journal.layers[str(layer.index)] for layer in spec.layers]
    layers = tuple(entry.layer for entry in entries)
    tensors = [t for dense in journal.dense.values() for t in dense.tensors]
    files = {dense.file: dense.digest for dense in journal.dense.values()}
    files |= {name: FileDigest(len(data), blake3(data).hexdigest()) for name, data in small.items()}
    names = journal.settings.names
    return Manifest(
        moet=manifests.FORMAT_VERSION,
        fingerprint=fingerprint.whole(names, [(layer.index, layer.source) for layer in layers], tensors),
        names=names,
        source=Source(spec.architecture, str(checkpoint.config.get("_name_or_path") or "")),
        hidden=spec.hidden,
        inter=max(layer.inter for layer in layers),
        top_k=spec.top_k,
        activation=ActivationInfo(spec.activation.kind, spec.activation.limit, spec.activation.alpha),
        codebook=manifests.CODEBOOKS[layers[0].base.format],
        scheme=journal.settings.scheme,
        calibration=calibration,
        layers=layers,
        files=files,
        report=report.summary(entries, sum(dense.digest.bytes for dense in journal.dense.values())),
    )
