"""From config.json to ModelSpec: finds the family, reads its keys, and says which ones are wrong."""

from collections.abc import Collection
from typing import Any

from moet.errors import CheckpointError
from moet.models.deepseek import DEEPSEEK
from moet.models.deepseek_v4 import DEEPSEEK_V4, DEEPSEEK_V41
from moet.models.family import ModelFamily, layer_prefix
from moet.models.glm import GLM
from moet.models.gpt_oss import GPT_OSS
from moet.models.kimi import KIMI
from moet.models.minimax_m2 import MINIMAX_M2
from moet.models.mixtral import MIXTRAL
from moet.models.olmoe import OLMOE
from moet.models.qwen3_moe import QWEN3_MOE
from moet.models.rules import MOST_LAYERS, listed, natural
from moet.models.spec import Activation, ModelSpec, MoeLayer

FAMILIES: tuple[ModelFamily, ...] = (
    DEEPSEEK,
    DEEPSEEK_V4,
    DEEPSEEK_V41,
    GLM,
    KIMI,
    QWEN3_MOE,
    GPT_OSS,
    MIXTRAL,
    OLMOE,
    MINIMAX_M2,
)

BY_ARCHITECTURE: dict[str, ModelFamily] = {
    name: family for family in FAMILIES for name in family.architectures
}


MOST_EXPERTS, MOST_WIDTH = 1 << 16, 1 << 24
"""A config.json beyond these is damaged: refused before anything is counted up to it."""


def family_of(config: dict[str, Any]) -> tuple[str, ModelFamily]:
    """(architecture, family) of a config.json. Raises CheckpointError that lists the known architectures."""
    names = listed(config, "architectures")
    for name in names:
        if isinstance(name, str) and name in BY_ARCHITECTURE:
            return name, BY_ARCHITECTURE[name]
    raise CheckpointError(
        f"config.json, architectures: expected one of {', '.join(sorted(BY_ARCHITECTURE))}; found {names}. "
        "docs/models.md shows how to add one."
    )


def text_config(config: dict[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The part of the config that describes the language model."""
    if not family.text:
        return config
    if not isinstance(config.get(family.text), dict):
        raise CheckpointError(
            f"config.json, {family.text}: expected the language model's config, "
            f"found {config.get(family.text)!r}"
        )
    return config[family.text]


def spec_of(config: dict[str, Any], names: Collection[str] = ()) -> ModelSpec:
    """The model that a config.json declares.

    With `names`, the names of all tensors, it is the model that the checkpoint holds: the spelling of
    `experts` is the one in use, and MTP
    layers of which no tensor exists are left out (transformers drops them when it saves, and MTP is not
    needed for serving).
    Raises CheckpointError: unknown architecture, a key that is missing or no positive number, an activation
    that is not known.
    """
    architecture, family = family_of(config)
    text = text_config(config, family)
    count_key = next((key for key in family.count if text.get(key) is not None), family.count[0])
    count = _positive(text, count_key, architecture, MOST_EXPERTS)
    inter = _positive(text, family.inter, architecture)
    num_layers = _positive(text, family.layers, architecture, MOST_LAYERS)
    pattern = _spelling(family.experts, names)
    layers = [
        MoeLayer(index, pattern.format(layer=index), count, inter)
        for index in range(num_layers)
        if family.has_experts(text, index)
    ]
    mtp_pattern = family.mtp_experts or pattern
    own_width = text.get(family.mtp_width)
    mtp_width = _positive(text, family.mtp_width, architecture, MOST_EXPERTS) if own_width else count
    for k in range(mtp_layer_count(family, text)):
        index = num_layers + k
        if not names or _any_starts(names, layer_prefix(mtp_pattern).format(layer=index, mtp=k)):
            layers.append(MoeLayer(index, mtp_pattern.format(layer=index, mtp=k), mtp_width, inter, mtp=True))
    if not layers:
        raise CheckpointError(
            f"config.json of {architecture}: expected layers with routed experts, "
            f"found none in {num_layers} layers"
        )
    top_k = _positive(text, family.top_k, architecture)
    if top_k > count:
        raise CheckpointError(
            f"config.json, {family.top_k}: expected at most {count_key} = {count}, found {top_k}"
        )
    return ModelSpec(
        architecture=architecture,
        hidden=_positive(text, family.hidden, architecture),
        num_layers=num_layers,
        top_k=top_k,
        activation=_activation(text, family, architecture),
        layers=tuple(layers),
    )


def mtp_layer_count(family: ModelFamily, text: dict[str, Any]) -> int:
    """How many MTP layers the config declares (0 if the family has no key for it)."""
    return natural(text, family.mtp_count, 0) if family.mtp_count else 0


def dense_prefixes(family: ModelFamily, config: dict[str, Any]) -> tuple[str, ...]:
    """`family.dense` with every layer number the model has filled in: what a tensor that is no routed expert
    may be called."""
    text = text_config(config, family)
    mtp = mtp_layer_count(family, text)
    layers = range(text[family.layers] + (0 if family.mtp_experts else mtp))
    return tuple(
        dict.fromkeys(
            prefix.format(layer=layer, mtp=k)
            for prefix in family.dense
            for layer in (layers if "{layer}" in prefix else (0,))
            for k in (range(mtp) if "{mtp}" in prefix else (0,))
        )
    )


def _spelling(patterns: tuple[str, ...], names: Collection[str]) -> str:
    for pattern in patterns:
        if _any_starts(names, pattern[: pattern.index("{")]):
            return pattern
    return patterns[0]


def _any_starts(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _positive(text: dict[str, Any], key: str, architecture: str, most: int = MOST_WIDTH) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise CheckpointError(
            f"config.json of {architecture}, {key}: expected a positive integer up to {most}, "
            f"found {value!r:.100}"
        )
    return value


def _activation(text: dict[str, Any], family: ModelFamily, architecture: str) -> Activation:
    name = text.get("hidden_act") or "silu"  # every listed family's own default
    if name not in ("silu", "swish"):
        raise CheckpointError(
            f"config.json of {architecture}, hidden_act: expected silu, found {name!r}. "
            "No other expert activation is known."
        )
    rule = family.activation
    limit = text.get("swiglu_limit")
    if not rule.limit_key:
        if limit is not None:
            raise CheckpointError(
                f"config.json of {architecture}, swiglu_limit: expected none, "
                f"as this architecture does not clamp, found {limit!r}"
            )
        return Activation(rule.kind)
    limit = text.get(rule.limit_key, rule.default_limit)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
        raise CheckpointError(
            f"config.json of {architecture}, {rule.limit_key}: expected a positive number, found {limit!r}"
        )
    return Activation(rule.kind, None if limit is None else float(limit))
