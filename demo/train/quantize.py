"""Fake quantization of expert weights: what serving them in few bits does to them."""

import torch

BLOCK = 32  # weights along K that share one exponent


def two_bit(weight: torch.Tensor) -> torch.Tensor:
    """Rounds `weight` [..., K] to {-4, -1, 1, 4} * 2^e, one e per 32 weights, the e of least squared error.

    Four exponents are tried per block: from the one whose outer level covers the largest
    weight down to an eighth of it. The best is always among them for bell-shaped weights.
    """
    shape = weight.shape
    blocks = weight.float().reshape(-1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    top = torch.ceil(torch.log2(largest / 4))
    magnitude = blocks.abs()
    best_error, best = torch.full_like(largest, float("inf")), torch.zeros_like(blocks)
    for lower in range(4):
        scale = torch.exp2(top - lower)
        rounded = torch.where(magnitude < 2.5 * scale, scale, 4 * scale)
        error = (magnitude - rounded).square().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, rounded, best)
    return torch.where(blocks < 0, -best, best).reshape(shape).to(weight.dtype)


def straight_through(weight: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`weight` [E, N, K] with the experts that `mask` [E] (0 or 1) names rounded to two bits.

    The gradient passes as if nothing had been rounded.
    """
    if mask is None:
        return weight
    with torch.no_grad():
        change = (two_bit(weight) - weight) * mask[:, None, None]
    return weight + change
