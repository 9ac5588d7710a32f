"""A routed-expert layer in float32 on the device, from dequantized matrices: what columns are checked against."""

from collections.abc import Callable

import torch

from moet.models import Activation

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""gate, up [inter, hidden], down [hidden, inter], their biases or None; float32."""


def activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    oai = activation.kind == "swiglu_oai"
    swished = gate * torch.sigmoid((activation.alpha if oai else 1.0) * gate)
    return swished * (up + 1) if oai else swished * up


def layer(
    expert: Callable[[int], Matrices], activation: Activation, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """float32 [tokens, hidden]. expert: gives an expert's matrices. Products in full float32 (not TF32)."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    x = x.float()
    for e in ids.unique().tolist():
        gate, up, down, gate_bias, up_bias, down_bias = expert(e)
        share = ((ids == e) * weights).sum(-1)
        rows = share.nonzero()[:, 0]
        g, u = torch.nn.functional.linear(x[rows], gate, gate_bias), torch.nn.functional.linear(x[rows], up, up_bias)
        answer = torch.nn.functional.linear(activate(activation, g, u), down, down_bias)
        out[rows] += share[rows, None] * answer
    return out


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """norm(found - wanted) / norm(wanted); NaN if anything is not finite."""
    found, wanted = found.double(), wanted.double()
    if not torch.isfinite(found).all():
        return float("nan")
    return float((found - wanted).norm() / wanted.norm())
