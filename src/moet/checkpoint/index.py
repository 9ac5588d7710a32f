"""Which shard holds which tensor: model.safetensors.index.json, or the header of the only file."""

from pathlib import Path
from typing import Any

from moet.checkpoint.safetensors import parse_json, read_header
from moet.checkpoint.source import ShardSource
from moet.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path, unique: bool = False) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file if it is none, or if keys have to be `unique` and
    one comes twice."""
    try:
        value = parse_json(path.read_bytes(), unique)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a file of a checkpoint or pack, found none; is {path.parent} one?") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: expected a JSON object, found: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_index(source: ShardSource) -> dict[str, str]:
    """{tensor name: shard file name}, as the index says. With no index, the folder's only safetensors file is
    it.

    Raises CheckpointError: no index and several files or none, an index that is no map of names to file
    names, a file outside the folder.
    """
    path = source.root / INDEX
    if path.is_file():
        weights = read_json(path, unique=True).get("weight_map")
        if (
            not isinstance(weights, dict)
            or not weights
            or not all(isinstance(v, str) for v in weights.values())
        ):
            raise CheckpointError(
                f"{path}, weight_map: expected a map of tensor names to file names, "
                f"found {str(weights)[:100]}"
            )
        for shard in set(weights.values()):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path}, weight_map: expected names of .safetensors files in the same folder, "
                    f"found {shard!r}"
                )
        return weights
    files = sorted(p.name for p in source.root.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(
            f"{path}: expected an index, as the folder has {len(files)} safetensors files "
            f"({', '.join(files[:3])}, ...), found none. "
            "Download it from where the checkpoint is published."
        )
    shard = files[0] if files else SINGLE
    return dict.fromkeys(read_header(source.fetch(shard)), shard)
