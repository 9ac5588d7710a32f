"""What a model is, as far as its routed experts are concerned: the result of reading a config.json."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Activation:
    """The function between the two expert GEMMs, of g = gate @ x and u = up @ x.

    swiglu      silu(min(g, limit)) * clamp(u, -limit, limit); no clamp if limit is None
    swiglu_oai  g = min(g, limit), u = clamp(u, -limit, limit): (u + 1) * g * sigmoid(alpha * g)    (gpt-oss)
    """

    kind: Literal["swiglu", "swiglu_oai"] = "swiglu"
    limit: float | None = None
    alpha: float = 1.702


@dataclass(frozen=True)
class MoeLayer:
    """A layer with routed experts.

    index   the layer's number in tensor names; MTP layers count on from num_hidden_layers, as DeepSeek-V3
            numbers them
    prefix  what the names of all tensors of its routed experts start with, up to and including the last dot
            before the
            expert's number: "model.layers.3.mlp.experts."
    experts, inter  number of routed experts, rows of gate and up
    mtp     belongs to the multi-token-prediction (draft) part
    """

    index: int
    prefix: str
    experts: int
    inter: int
    mtp: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A Mixture-of-Experts model. `layers` holds the layers with routed experts only, ascending by index."""

    architecture: str
    hidden: int
    num_layers: int
    top_k: int
    activation: Activation
    layers: tuple[MoeLayer, ...]

    @property
    def mtp_layers(self) -> tuple[MoeLayer, ...]:
        return tuple(layer for layer in self.layers if layer.mtp)

    def layer(self, index: int) -> MoeLayer:
        """Raises KeyError if that layer has no routed experts."""
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise KeyError(index)
