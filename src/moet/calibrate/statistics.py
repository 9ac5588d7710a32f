"""Second moments of a matrix's inputs: what an encoder needs to know about the data."""

from dataclasses import dataclass

import torch

PRIOR_TOKENS = 128
"""How many tokens the layer's shared statistics count for beside an expert's own. With fewer of its own an expert
is reported as one that fell back."""


@dataclass
class Moments:
    """Sums over tokens, `w` the router's weight: of w^2 x x^T (x: what the quantized network gives the matrix), of
    w^2 f x^T (f: what the full one gives it for the same token), of w^2, and their number. [K, K] float32."""

    own: torch.Tensor
    cross: torch.Tensor | None
    weight: float = 0.0
    count: int = 0

    @classmethod
    def zeros(cls, size: int, device: torch.device, cross: bool) -> "Moments":
        def square() -> torch.Tensor:
            return torch.zeros(size, size, dtype=torch.float32, device=device)

        return cls(square(), square() if cross else None)

    def add(
        self, inputs: torch.Tensor, full: torch.Tensor | None, weights: torch.Tensor | None = None
    ) -> None:
        """inputs, full: float32 [n, K]; weights: float32 [n], None: all 1."""
        squared = torch.ones(len(inputs), device=inputs.device) if weights is None else weights.square()
        scaled = inputs * squared[:, None]
        self.own.addmm_(inputs.T, scaled)
        if self.cross is not None:
            self.cross.addmm_(full.T, scaled)
        self.weight += float(squared.sum(dtype=torch.float64))
        self.count += len(inputs)

    def mean(self, which: str) -> torch.Tensor:
        """`own` or `cross` a token, of tokens that all count the same on average."""
        return getattr(self, which) / (self.weight or 1.0)


def blended(
    own: Moments, shared: Moments, prior: int = PRIOR_TOKENS
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(own, cross) a token: the expert's, shrunk towards the shared ones as if those were `prior` tokens more. An
    expert without tokens has the shared ones."""
    share = own.count / (own.count + prior)

    def mixed(which: str) -> torch.Tensor:
        return torch.lerp(shared.mean(which), own.mean(which), share)

    return mixed("own"), None if own.cross is None else mixed("cross")
