"""The module that holds all routed experts of a layer, as transformers 5 builds it for every model: two tensors,
and `forward(hidden_states, top_k_index, top_k_weights)`."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from moet.checkpoint import ExpertWeights, dequantize_expert
from moet.errors import CheckpointError


@dataclass(frozen=True)
class FusedExperts:
    """How a module stores its experts.

    gate_up_proj  [experts, 2 * inter, hidden], gate's rows first; interleaved: gate, up, gate, up; transposed:
                  [experts, hidden, 2 * inter]
    down_proj     [experts, hidden, inter], or transposed
    gate_up_proj_bias, down_proj_bias  [experts, rows], if the model has biases
    """

    module: nn.Module
    interleaved: bool
    transposed: bool
    biased: bool

    @classmethod
    def of(cls, layer: nn.Module) -> "FusedExperts":
        """The experts of a decoder layer. Raises CheckpointError if it has none of this kind."""
        for module in layer.modules():
            if {"gate_up_proj", "down_proj"} <= module._parameters.keys() and module.gate_up_proj.dim() == 3:
                return cls(
                    module,
                    not getattr(module, "is_concatenated", True),
                    getattr(module, "is_transposed", False),
                    "down_proj_bias" in module._parameters,
                )
        raise CheckpointError(
            f"{type(layer).__name__}: expected a module with gate_up_proj and down_proj of all routed experts, "
            "found none; transformers 5 builds them so"
        )

    def empty(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Uninitialised tensors by parameter name, of the shapes and dtypes that the module wants."""
        return {name: torch.empty_like(p, device=device) for name, p in self.module._parameters.items()}

    def set(self, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Overwrites one expert's matrices, float [inter, hidden], [inter, hidden], [hidden, inter]."""
        both, out = self.module.gate_up_proj[expert], self.module.down_proj[expert]
        if self.transposed:
            both, out = both.T, out.T
        first, second = _halves(both, self.interleaved)
        first.copy_(gate)
        second.copy_(up)
        out.copy_(down)

    def set_native(self, weights: ExpertWeights) -> None:
        """Overwrites one expert with the checkpoint's values, rounded to float32, and its biases."""
        gate, up, down = (torch.from_numpy(m) for m in dequantize_expert(weights, np.float32))
        self.set(weights.expert, gate, up, down)
        if self.biased:
            first, second = _halves(self.module.gate_up_proj_bias[weights.expert], self.interleaved)
            first.copy_(torch.from_numpy(weights.gate.bias))
            second.copy_(torch.from_numpy(weights.up.bias))
            self.module.down_proj_bias[weights.expert].copy_(torch.from_numpy(weights.down.bias))


def _halves(both: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate's and up's rows of a fused matrix or bias, as views."""
    return (both[0::2], both[1::2]) if interleaved else tuple(both.chunk(2))
