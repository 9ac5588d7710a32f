"""The multi-token-prediction layer of DeepSeek-V3's kind, which GLM has too: a decoder layer of the model's own class after
the last one, on a mix of the next token and of what the model made of this one. transformers leaves it out."""

from typing import Any

import torch

from moet.checkpoint import Checkpoint
from moet.forward.dense import DenseTensors

PARTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Of the layer, beside what a decoder layer has: norms of the embedding and of the hidden state, and what mixes them."""


def mtp_prefix(checkpoint: Checkpoint) -> tuple[int, str] | None:
    """(index, what its tensors' names start with) of the first MTP layer, if it is of this kind."""
    for layer in checkpoint.spec.mtp_layers[:1]:
        middle = f"layers.{layer.index}."
        for name in checkpoint.dense:
            prefix, found, rest = name.partition(middle)
            if (
                found
                and rest == PARTS[-1]
                and all(f"{prefix}{middle}{part}" in checkpoint.dense for part in PARTS)
            ):
                return layer.index, prefix + middle
    return None


def with_one_more_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose MTP layer is counted; lists with an entry a layer repeat their last one. GLM-5's MTP
    layer has an indexer of its own, whoever shares one."""
    count = config["num_hidden_layers"]
    longer = {k: [*v, v[-1]] for k, v in config.items() if isinstance(v, list) and len(v) == count}
    if "indexer_types" in longer:
        longer["indexer_types"][-1] = "full"
    return config | longer | {"num_hidden_layers": count + 1}


def mixed(
    dense: DenseTensors, prefix: str, embedded: torch.Tensor, hidden: torch.Tensor, eps: float
) -> torch.Tensor:
    """What the layer takes, [B, T, H]. embedded: float [B, T, H] of tokens 1 to T; hidden: of states 0 to T - 1 after the
    model's final norm. DeepSeek-V3 technical report, equation 21; the first embedding is left out, as vLLM and SGLang do."""
    embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)
    enorm, hnorm, projection = (
        dense.read(prefix + part).to(device=hidden.device, dtype=hidden.dtype) for part in PARTS
    )
    both = torch.cat((_normed(embedded, enorm, eps), _normed(hidden, hnorm, eps)), dim=-1)
    return both @ projection.T


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(weight.dtype)
