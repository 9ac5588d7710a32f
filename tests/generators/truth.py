"""What a generator wrote, as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .safetensors_file import write_folder
from .schemes import raw

LANGUAGE = "language_model."


@dataclass(frozen=True)
class Expert:
    """Dequantized projections, float64: gate and up [inter, hidden], down [hidden, inter]; biases float32 [rows] or None."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None


@dataclass(frozen=True)
class Site:
    """Where a layer's routed experts live in the checkpoint. `names` are gate, up, down; None: gpt-oss' fused tensors."""

    prefix: str
    names: tuple[str, str, str] | None
    format: str


@dataclass(frozen=True)
class Truth:
    """A written checkpoint. `experts` is keyed by (layer, expert); layers are numbered as moet numbers them: MTP layers
    after the last hidden layer. `values` has every other tensor in float32 under the name it has when nothing is quantized."""

    root: Path
    config: dict
    sites: dict[int, Site]
    experts: dict[tuple[int, int], Expert]
    values: dict[str, np.ndarray]

    def write_dequantized(self, out: Path, experts: Mapping[tuple[int, int], Expert] | None = None) -> Path:
        """The same model unquantized in float32, for engines that know nothing of the quantization; `experts` replaces the
        routed experts. float64 values are rounded to float32 once (relative error <= 2^-24). Of a model with a vision tower
        this is the language model alone."""
        chosen = experts or self.experts
        tensors = {
            name: value if value.dtype.kind == "i" else value.astype(np.float32)
            for name, value in self.values.items()
        }
        for layer, site in self.sites.items():
            count = max(e for n, e in self.experts if n == layer) + 1
            mine = [chosen[layer, e] for e in range(count)]
            tensors |= unquantized_experts(site, mine)
        if "text_config" in self.config:
            tensors = {
                name.removeprefix(LANGUAGE): value
                for name, value in tensors.items()
                if name.startswith(LANGUAGE)
            }
        stored = {
            name: raw("I64" if value.dtype.kind == "i" else "F32", value) for name, value in tensors.items()
        }
        write_folder(out, stored, unquantized_config(self.config))
        for extra in [*self.root.glob("*token*"), *self.root.glob("chat_template*")]:
            (out / extra.name).write_bytes(extra.read_bytes())
        return out


def unquantized_experts(site: Site, experts: list[Expert]) -> dict[str, np.ndarray]:
    """A layer's experts under their unquantized names, float32."""
    if site.names is None:  # gpt-oss BF16: [E, in, out], gate and up columns interleaved
        both = np.stack([np.stack([e.gate.T, e.up.T], -1).reshape(e.gate.shape[1], -1) for e in experts])
        out = {
            "gate_up_proj": both,
            "down_proj": np.stack([e.down.T for e in experts]),
            "gate_up_proj_bias": np.stack(
                [np.stack([e.gate_bias, e.up_bias], -1).reshape(-1) for e in experts]
            ),
            "down_proj_bias": np.stack([e.down_bias for e in experts]),
        }
        return {f"{site.prefix}.{name}": value.astype(np.float32) for name, value in out.items()}
    return {
        f"{site.prefix}.{index}.{name}.weight": matrix.astype(np.float32)
        for index, e in enumerate(experts)
        for name, matrix in zip(site.names, (e.gate, e.up, e.down), strict=True)
    }


def unquantized_config(config: dict) -> dict:
    """config.json of the language model without its quantization, dtype float32. Kimi-K2's own code calls its config
    deepseek_v3 with another name, and transformers knows only that one."""
    text = config.get("text_config", config)
    out = {
        k: v for k, v in text.items() if k not in ("quantization_config", "torch_dtype", "expert_dtype")
    } | {"dtype": "float32"}
    return out | ({"model_type": "deepseek_v3"} if out["model_type"] == "kimi_k2" else {})
