"""What all columns of a cell are given: several calls, each with states, routing weights and experts of its own."""

from dataclasses import dataclass

import numpy as np
import routing
import torch

from gemm.shapes import Shape

TOUCHED = 2 << 30
"""Bytes of 2-bit rows that the calls of a replay should read together: many times an L2 cache (60 MB), so a replay finds nothing of the one before it."""
MOST_CALLS = 64


@dataclass(frozen=True)
class Inputs:
    """x bf16 [calls, tokens, hidden]; weights float32 and ids int32 [calls, tokens, top_k]. distinct: experts that each call reads."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    distinct: tuple[int, ...]

    @property
    def calls(self) -> int:
        return len(self.distinct)

    @property
    def tokens(self) -> int:
        return self.x.shape[1]


def routed(shape: Shape, calls: int, tokens: int, seed: int = 0) -> np.ndarray:
    """int32 [calls, tokens, top_k], a call's popular experts being its own (it stands for a layer).

    popular: an expert's score is -0.87 ln(1 + rank) plus normal noise (benchmarks/gpu/routing.py); uniform: noise alone. The best top_k are taken.
    """
    if shape.routing == "popular":
        return routing.trace(1, calls, tokens, shape.experts, shape.top_k, seed)[0]
    scores = np.random.default_rng([seed, tokens]).standard_normal((calls, tokens, shape.experts), np.float32)
    return np.argpartition(-scores, shape.top_k, axis=-1)[..., : shape.top_k].astype(np.int32)


def distinct_experts(ids: np.ndarray) -> tuple[int, ...]:
    return tuple(len(np.unique(call)) for call in ids)


def call_count(shape: Shape, tokens: int, copies: int) -> int:
    """Calls of a replay: a multiple of `copies`, enough to read TOUCHED bytes of tcq2 rows, at most MOST_CALLS."""
    geometry = shape.geometry("tcq2")
    per_call = distinct_experts(routed(shape, 1, tokens))[0] * geometry.extras_offset
    wanted = min(MOST_CALLS, max(copies, -(-TOUCHED // per_call)))
    return -(-wanted // copies) * copies


def make(shape: Shape, tokens: int, copies: int, device: torch.device, seed: int = 0) -> Inputs:
    calls = call_count(shape, tokens, copies)
    ids = routed(shape, calls, tokens, seed)
    generator = torch.Generator(device).manual_seed(seed + tokens)
    x = torch.randn((calls, tokens, shape.hidden), device=device, generator=generator).bfloat16()
    weights = torch.rand((calls, tokens, shape.top_k), device=device, generator=generator) + 0.5
    return Inputs(x, weights / weights.sum(-1, keepdim=True), torch.from_numpy(ids).to(device), distinct_experts(ids))
