"""Second moments of a matrix's inputs: what an encoder needs to know about the data."""

from dataclasses import dataclass

import torch

PRIOR_TOKENS = 128
"""How many tokens the layer's shared statistics count for beside an expert's own. With fewer of its own an expert
is reported as one that fell back."""


@dataclass
class Moments:
    """Sums over tokens, `w` the router's weight: own of w^2 x x^T [K, K] (x: what the quantized network gives the matrix),
    wanted of w^2 y x^T [N, K] (y: what its answer should be), weight of w^2, and their number. float32."""

    own: torch.Tensor
    wanted: torch.Tensor | None
    weight: float = 0.0
    count: int = 0

    @classmethod
    def zeros(cls, columns: int, device: torch.device, rows: int = 0) -> "Moments":
        """rows: N, or 0 where no outputs are wanted."""
        own = torch.zeros(columns, columns, device=device)
        return cls(own, torch.zeros(rows, columns, device=device) if rows else None)

    def add(
        self, inputs: torch.Tensor, outputs: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> None:
        """inputs: float32 [n, K]; outputs: float32 [n, N]; weights: float32 [n], None: all 1."""
        squared = torch.ones(len(inputs), device=inputs.device) if weights is None else weights.square()
        scaled = inputs * squared[:, None]
        self.own.addmm_(inputs.T, scaled)
        if self.wanted is not None:
            self.wanted.addmm_(outputs.T, scaled)
        self.weight += float(squared.sum(dtype=torch.float64))
        self.count += len(inputs)

    def mean(self, which: str) -> torch.Tensor:
        """`own` or `wanted` a token, of tokens that all count the same on average."""
        return getattr(self, which) / (self.weight or 1.0)


def blended(own: Moments, shared: Moments, prior: int = PRIOR_TOKENS) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(own, wanted) a token: the expert's, shrunk towards the shared ones as if those were `prior` tokens more. An
    expert without tokens has the shared ones."""
    share = own.count / (own.count + prior)

    def mixed(which: str) -> torch.Tensor:
        return torch.lerp(shared.mean(which), own.mean(which), share)

    return mixed("own"), None if own.wanted is None else mixed("wanted")
