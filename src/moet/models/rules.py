"""Which layers have routed experts: the rules that config.json files use, as functions of (config, layer)."""

from typing import Any


def after_first_dense(config: dict[str, Any], layer: int) -> bool:
    """DeepSeek, GLM, Kimi: `mlp_layer_types` if there is one, else all from `first_k_dense_replace` on, every
    `moe_layer_freq`-th."""
    kinds = config.get("mlp_layer_types")
    if kinds and layer < len(kinds):
        return kinds[layer] == "sparse"
    return (
        layer >= (config.get("first_k_dense_replace") or 0)
        and layer % (config.get("moe_layer_freq") or 1) == 0
    )


def every_step(config: dict[str, Any], layer: int) -> bool:
    """Qwen: every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )
