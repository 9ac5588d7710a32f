"""Which layers have routed experts: the rules that config.json files use, as functions of (config, layer)."""

from typing import Any

from moet.errors import CheckpointError

MOST_LAYERS = 1 << 14


def natural(config: dict[str, Any], key: str, default: int, most: int = MOST_LAYERS) -> int:
    """A key of config.json; `default` if it is missing, null or 0. Raises CheckpointError if it is no integer."""
    value = config.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise CheckpointError(f"config.json, {key}: expected an integer of 0 to {most}, found {value!r:.100}")
    return value


def listed(config: dict[str, Any], key: str) -> list[Any]:
    """A list in config.json; empty if it is missing or null. Raises CheckpointError if it is anything else."""
    value = config.get(key) or []
    if not isinstance(value, list):
        raise CheckpointError(f"config.json, {key}: expected a list, found {value!r:.100}")
    return value


def after_first_dense(config: dict[str, Any], layer: int) -> bool:
    """DeepSeek, GLM, Kimi: `mlp_layer_types` if there is one, else all from `first_k_dense_replace` on, every
    `moe_layer_freq`-th."""
    kinds = listed(config, "mlp_layer_types")
    if layer < len(kinds):
        return kinds[layer] == "sparse"
    first = natural(config, "first_k_dense_replace", 0)
    return layer >= first and layer % natural(config, "moe_layer_freq", 1) == 0


def every_step(config: dict[str, Any], layer: int) -> bool:
    """Qwen: every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step = natural(config, "decoder_sparse_step", 1)
    return layer not in listed(config, "mlp_only_layers") and (layer + 1) % step == 0
