"""How one family of models names and numbers its routed experts. An instance is a declaration;
`docs/models.md` explains each field."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LayerRule = Callable[[dict[str, Any], int], bool]
"""(text config, layer) -> does that layer have routed experts?"""


@dataclass(frozen=True)
class Projections:
    """Names of an expert's three matrices, and of the matrix that holds gate and up where a checkpoint stores
    all experts in one tensor.

    interleaved  fused rows alternate gate, up, gate, up (gpt-oss); otherwise the first half is gate
    transposed   unquantized fused tensors are [experts, K, N] (gpt-oss in BF16); otherwise [experts, N, K].
                 Declared, never guessed from shapes: gpt-oss has K = N.
    """

    gate: str
    up: str
    down: str
    fused: str = ""
    interleaved: bool = False
    transposed: bool = False


GATE_UP_DOWN = Projections("gate_proj", "up_proj", "down_proj", fused="gate_up_proj")
W1_W3_W2 = Projections("w1", "w3", "w2")


@dataclass(frozen=True)
class ActivationRule:
    """kind: see Activation. limit_key: the config key of the clamp ("" if the family has none),
    default_limit: its value if the key is absent."""

    kind: str = "swiglu"
    limit_key: str = ""
    default_limit: float | None = None


def every_layer(config: dict[str, Any], layer: int) -> bool:
    return True


@dataclass(frozen=True)
class ModelFamily:
    """A family: the architectures, the names of their tensors, and the config keys of their dimensions.

    experts     what the names of a layer's routed experts start with, "{layer}" being its number. Several
                spellings: the first one that the checkpoint uses.
    mtp_experts the same for MTP layers where they have a numbering of their own ("{mtp}"); empty: they
                continue `experts` at num_hidden_layers
    router      a tensor that every MoE layer has to have, relative to the layer ("mlp.gate.weight"): experts
                without a router are half a layer
    dense       what names of tensors that are no routed experts may start with; "{layer}" and "{mtp}" stand
                for a number the model has
    text        key of the nested text config ("" if there is none)
    has_experts says which layers have routed experts
    The remaining fields are config keys (count: the first one that the config has); mtp_count: number of MTP
    layers, mtp_width: their number of experts if the config has that key.
    """

    architectures: tuple[str, ...]
    experts: tuple[str, ...]
    router: str
    dense: tuple[str, ...]
    projections: Projections = GATE_UP_DOWN
    mtp_experts: str = ""
    text: str = ""
    has_experts: LayerRule = every_layer
    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    top_k: str = "num_experts_per_tok"
    count: tuple[str, ...] = ("n_routed_experts",)
    inter: str = "moe_intermediate_size"
    mtp_count: str = ""
    mtp_width: str = ""
    activation: ActivationRule = field(default_factory=ActivationRule)


def layer_prefix(experts: str) -> str:
    """ "model.layers.{layer}.mlp.experts." -> "model.layers.{layer}.": what all tensors of the layer start
    with."""
    return experts[: experts.index("}") + 2]
