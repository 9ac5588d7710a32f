"""The small files of a model folder: config.json with moet's entry in its quantization config, and what is
copied as it is."""

import json
import os
from pathlib import Path
from typing import Any

from moet.errors import CheckpointError, PackError
from moet.pack.manifest import FORMAT_VERSION

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
COPIED_SUFFIXES = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt", ".yaml", ".vocab", ".merges"}
COPIED_NAMES = ("license", "notice", "use_policy")
LEFT_FOLDERS = {"inference", "original", "onnx", "assets", "figures", "experts", "metal"}
LARGEST = 256 << 20
"""Tokenizers are tens of MB; a larger file with a known suffix is data of another kind."""


def pack_config(text: bytes, has_hf_quant_config: bool) -> bytes:
    """config.json of the pack: `quantization_config` gains {"moet": {"format": 2}} and stays otherwise as it
    is.

    A model without one gets {"quant_method": "moet", "moet": ...}. Where only hf_quant_config.json describes
    the quantization, the text stays as it is:
    vLLM reads that file only if config.json has no `quantization_config`. A `quantization_config` inside
    text_config is extended there.
    """
    config: dict[str, Any] = json.loads(text)
    entry = {"format": FORMAT_VERSION}
    nested = config.get("text_config")
    if isinstance(config.get("quantization_config"), dict):
        config["quantization_config"]["moet"] = entry
    elif isinstance(nested, dict) and isinstance(nested.get("quantization_config"), dict):
        nested["quantization_config"]["moet"] = entry
    elif has_hf_quant_config:
        return text
    else:
        config["quantization_config"] = {"quant_method": "moet", "moet": entry}
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def original_config(text: bytes) -> dict[str, Any]:
    """The source's config back from a pack's: what `pack_config` added is taken away."""
    config: dict[str, Any] = json.loads(text)
    for place in (config, config.get("text_config")):
        if isinstance(place, dict) and isinstance(place.get("quantization_config"), dict):
            place["quantization_config"].pop("moet", None)
            if place["quantization_config"] == {"quant_method": "moet"}:
                del place["quantization_config"]
    return config


def copied(root: Path) -> list[str]:
    """Relative names of the files of a checkpoint folder that the pack copies: tokenizer, templates,
    generation config, code, licence. Raises CheckpointError if one has a name that moet.json cannot hold."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in LEFT_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if _is_copied(relative) and path.is_file() and path.stat().st_size <= LARGEST:
                if not relative.isprintable():
                    raise CheckpointError(
                        f"{root}: expected files with printable names in UTF-8, found {relative!a}; rename it"
                    )
                found.append(relative)
    return found


def _is_copied(relative: str) -> bool:
    name = relative.rsplit("/", 1)[-1].lower()
    if name.startswith(".") or relative == CONFIG or name.endswith(".index.json"):
        return False
    return name.startswith(COPIED_NAMES) or Path(name).suffix in COPIED_SUFFIXES


def index_json(tensor_files: dict[str, str], total_size: int) -> bytes:
    """model.safetensors.index.json of the dense tensors."""
    return (
        json.dumps(
            {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(tensor_files.items()))},
            indent=2,
        ).encode()
        + b"\n"
    )


def refuse_folders(src: Path, dst: Path) -> None:
    """Raises PackError if SRC is a pack already, or if one folder is inside the other."""
    a, b = src.resolve(), dst.resolve()
    if (src / "moet.json").exists():
        raise PackError(f"{src}: expected a checkpoint, found a pack (moet.json); there is nothing to pack")
    if a == b:
        raise PackError(
            f"{dst}: expected another folder than the source; the pack is a model folder of its own"
        )
    for folder in b.parents:
        if (folder / "moet.json").exists():
            raise PackError(
                f"{dst}: expected a folder outside of other packs, found the pack {folder} around it"
            )
    downloads = b / ".moet"  # where --consume keeps the shards of a Hub repository
    if a in b.parents or (b in a.parents and downloads not in a.parents):
        raise PackError(f"{dst}: expected a folder outside {src} and not around it; one is inside the other")
