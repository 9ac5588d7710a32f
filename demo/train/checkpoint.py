"""Between the training model's state and a plain Hugging Face checkpoint."""

import json
import re
from pathlib import Path

import torch
from config import ModelConfig
from safetensors import safe_open
from safetensors.torch import save_file

SHARD = 14 * 2**20


def to_hf(state: dict[str, torch.Tensor], c: ModelConfig) -> dict[str, torch.Tensor]:
    """Training names to official names: experts one by one, the MTP layer as layer `c.layers`."""
    out = {}
    for name, tensor in state.items():
        if name != "lm_head.weight":
            name = "model." + name
        name = name.replace("model.mtp.block.", f"model.layers.{c.layers}.")
        name = name.replace("model.mtp.norm.", f"model.layers.{c.layers}.shared_head.norm.")
        name = name.replace("model.mtp.", f"model.layers.{c.layers}.")
        prefix = name.rsplit(".", 1)[0]
        if name.endswith(".mlp.gate_up"):
            for expert, (gate, up) in enumerate(zip(*tensor.chunk(2, dim=1))):
                out[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate
                out[f"{prefix}.experts.{expert}.up_proj.weight"] = up
        elif name.endswith(".mlp.down"):
            for expert, down in enumerate(tensor):
                out[f"{prefix}.experts.{expert}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return {name: tensor.contiguous() for name, tensor in out.items()}


def from_hf(tensors: dict[str, torch.Tensor], c: ModelConfig) -> dict[str, torch.Tensor]:
    """The inverse of `to_hf`, in float32."""
    out, experts = {}, {}
    for name, tensor in tensors.items():
        tensor = tensor.float()
        if match := re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name):
            layer, expert, part = int(match[1]), int(match[2]), match[3]
            experts.setdefault(layer, {})[expert, part] = tensor
            continue
        name = name.replace(f"model.layers.{c.layers}.shared_head.norm.", "mtp.norm.")
        name = re.sub(rf"model\.layers\.{c.layers}\.(enorm|hnorm|eh_proj)\.", r"mtp.\1.", name)
        name = name.replace(f"model.layers.{c.layers}.", "mtp.block.")
        out[name.removeprefix("model.")] = tensor
    for layer, parts in experts.items():
        prefix = "mtp.block.mlp" if layer == c.layers else f"layers.{layer}.mlp"
        out[f"{prefix}.gate_up"] = torch.stack(
            [torch.cat((parts[e, "gate"], parts[e, "up"])) for e in range(c.experts)]
        )
        out[f"{prefix}.down"] = torch.stack([parts[e, "down"] for e in range(c.experts)])
    return out


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes safetensors shards of at most `SHARD` bytes and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards, size = [{}], 0
    for name in sorted(tensors, key=_natural):
        count = tensors[name].numel() * tensors[name].element_size()
        if size + count > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name].contiguous()
        size += count
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in bfloat16; the router's correction bias stays float32, as in the official files."""
    return {
        n: t.float() if n.endswith("e_score_correction_bias") else t.bfloat16() for n, t in tensors.items()
    }


def _natural(name: str) -> list:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", name)]
