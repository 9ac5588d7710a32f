"""Model folders: safetensors shards, the index, config.json. The format is 8 bytes of header length, JSON, data."""

import json
from pathlib import Path

from .schemes import Raw


def write_file(path: Path, tensors: dict[str, Raw]) -> None:
    """One safetensors file, tensors in the given order."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.data.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.data.tobytes())


def write_folder(out: Path, tensors: dict[str, Raw], config: dict, shards: int = 1) -> None:
    """config.json and the tensors, in `shards` files of about equal count; an index if there is more than one."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        return write_file(out / "model.safetensors", tensors)
    names = list(tensors)
    where: dict[str, str] = {}
    for i in range(shards):
        part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_file(out / file, {name: tensors[name] for name in part})
        where |= dict.fromkeys(part, file)
    total = sum(t.data.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
