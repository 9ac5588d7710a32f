"""Reads a quantized checkpoint folder into a `Truth` with safetensors' reader and the generators' tables: no moet code.

For the exports of modelopt and llmcompressor, whose numbers nobody here chose.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from tests.generators import Expert, Truth
from tests.generators import numbers as nb
from tests.generators.truth import Site

WORDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
EXPERT = re.compile(r"(.*layers\.(\d+)\.\w+\.experts)\.(\d+)\.(\w+)$")


def read_folder(root: Path) -> Truth:
    """Per-expert layouts, every scheme of `tests.generators.schemes`."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(root.glob("model*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, part = name.rsplit(".", 1)
        modules.setdefault(module, {})[part] = tensor
    values: dict[str, np.ndarray] = {}
    found: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    sites: dict[int, Site] = {}
    for module, parts in modules.items():
        format, value = _value(parts)
        match = EXPERT.match(module)
        if match:
            prefix, layer, expert, projection = match[1], int(match[2]), int(match[3]), match[4]
            found.setdefault((layer, expert), {})[WORDS[projection]] = value
            names = (
                ("w1", "w3", "w2") if projection.startswith("w") else ("gate_proj", "up_proj", "down_proj")
            )
            sites[layer] = Site(prefix, names, format)
            continue
        if value is not None:
            values[f"{module}.weight"] = value
        for part in ("bias", "e_score_correction_bias"):
            if part in parts:
                values[f"{module}.{part}"] = parts[part].double().numpy()
    config = json.loads((root / "config.json").read_text())
    return Truth(
        root, config, sites, {key: Expert(**matrices) for key, matrices in sorted(found.items())}, values
    )


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def _value(parts: dict[str, torch.Tensor]) -> tuple[str, np.ndarray | None]:
    """(moet's word for the format, float64 value) of one module, from which tensors are there."""
    weight = parts.get("weight", parts.get("weight_packed"))
    if weight is None:
        return "", None
    scale = next(
        (parts[name] for name in ("weight_scale", "weight_scale_inv", "scale") if name in parts), None
    )
    if scale is None:
        return "bf16", weight.double().numpy()
    if weight.dtype in (torch.uint8, torch.int8):
        packed = _bytes(weight)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
        if scale.dtype == torch.float8_e4m3fn:
            multiplier = (
                float(parts["weight_scale_2"])
                if "weight_scale_2" in parts
                else float(np.float32(1) / parts["weight_global_scale"].numpy()[0])
            )
            return "nvfp4", nb.E2M1[codes] * nb.spread(
                nb.E4M3[_bytes(scale)] * multiplier, 1, 16, codes.shape
            )
        return "mxfp4", nb.E2M1[codes] * nb.spread(nb.ue8m0(_bytes(scale)), 1, 32, codes.shape)
    codes, wide = nb.E4M3[_bytes(weight)], scale.double().numpy()
    if wide.ndim == 0:
        return "fp8", codes * wide
    if wide.shape == (codes.shape[0], 1) and codes.shape[0] > 1:
        return "fp8_row", codes * wide
    wide = wide.reshape(wide.shape[0], wide.shape[2]) if wide.ndim == 4 else wide
    return "fp8", codes * nb.spread(wide, 128, 128, codes.shape)
