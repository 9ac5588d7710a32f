"""Router and experts: tokens sorted by expert, two grouped products."""

import torch
import torch.nn.functional as F
from config import ModelConfig
from quantize import straight_through
from torch import nn


class _Dispatch(torch.autograd.Function):
    """x [T, H] -> one row per routing in expert order [T k, H]; the backward is a gather, not a scatter."""

    @staticmethod
    def forward(ctx, x, order, inverse, active):
        ctx.save_for_backward(inverse)
        ctx.active = active
        return x[order // active]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.active)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows of x [N, H] in the order `index`; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(back)
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None, None


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [N, K] in expert order times weight [E, M, K] transposed -> [N, M]; expert e's rows end at ends[e]."""
    if x.is_cuda:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts, first = [], 0
    for expert, end in enumerate(ends.tolist()):
        parts.append(F.linear(x[first:end], weight[expert]))
        first = end
    return torch.cat(parts)


class Router(nn.Module):
    """Sigmoid scores; the bias takes part in the choice of experts, not in their weights."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.experts, c.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] -> (weights [T, k] float32, experts [T, k])"""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.c.active, dim=-1).indices
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.c.routed_scale, chosen


class Moe(nn.Module):
    """Routed experts plus one shared expert."""

    def __init__(self, c: ModelConfig, shared: nn.Module):
        super().__init__()
        self.c = c
        self.gate = Router(c)
        self.gate_up = nn.Parameter(torch.empty(c.experts, 2 * c.expert_intermediate, c.hidden))
        self.down = nn.Parameter(torch.empty(c.experts, c.hidden, c.expert_intermediate))
        self.shared_experts = shared

    def forward(self, x: torch.Tensor, two_bit: torch.Tensor | None = None):
        """x [B, S, H], two_bit [2, E] or None -> (output [B, S, H], routings per expert [E] float32)"""
        c, flat = self.c, x.flatten(0, 1)
        weights, chosen = self.gate(flat)
        order = chosen.flatten().sort(stable=True).indices
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        load = (chosen.flatten()[:, None] == torch.arange(c.experts, device=x.device)).sum(0)
        ends = load.cumsum(0).to(torch.int32)
        gate_up, down = (
            straight_through(w, None if two_bit is None else two_bit[i])
            for i, w in enumerate((self.gate_up, self.down))
        )
        dtype = torch.bfloat16 if x.is_cuda else x.dtype
        rows = _Dispatch.apply(flat.to(dtype), order, inverse, c.active)
        gate, up = grouped(rows, gate_up.to(dtype), ends).chunk(2, dim=-1)
        rows = grouped(F.silu(gate) * up, down.to(dtype), ends)
        rows = _Permute.apply(rows, inverse, order).unflatten(0, (-1, c.active))
        routed = (rows * weights[..., None].to(dtype)).sum(1).view_as(x)
        return routed + self.shared_experts(x), load.float()
