"""What a layer's routed experts are given, token by token, and giving the layer what they should have answered."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moet.errors import CheckpointError
from moet.forward import Decoder, States
from moet.forward.experts import FusedExperts


class _Recorded(BaseException):
    """Leaves the layer once its experts were called: what comes after them is not needed yet."""


@dataclass(frozen=True)
class Routing:
    """All tokens of all sequences at the experts of one layer.

    inputs   float32 [tokens, hidden]
    weights  float32 [slots]: the router's weight of each (token, expert) pair, ordered by expert, then token
    tokens   int64 [slots]: the pair's token
    starts   expert e's pairs are [starts[e], starts[e + 1])
    """

    inputs: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    starts: tuple[int, ...]

    @classmethod
    def of(cls, inputs: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, experts: int) -> "Routing":
        """index: int64 [tokens, top_k], distinct in each row; weights: float32 [tokens, top_k]."""
        order = torch.argsort(index.flatten(), stable=True)
        counts = torch.bincount(index.flatten(), minlength=experts).cpu()
        starts = (0, *counts.cumsum(0).tolist())
        return cls(inputs, weights.flatten()[order], order // index.shape[1], starts)

    def count(self, expert: int) -> int:
        return self.starts[expert + 1] - self.starts[expert]

    def pairs(self, expert: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, weights) of an expert, at most `step` at a time, tokens ascending."""
        begin, end = self.starts[expert : expert + 2]
        for at in range(begin, end, step):
            part = slice(at, min(at + step, end))
            yield self.tokens[part], self.weights[part]


@contextlib.contextmanager
def _replaced(module: nn.Module, forward) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def record(decoder: Decoder, layer: nn.Module, states: States, index: int, experts: int) -> Routing:
    """Runs the layer up to its experts, which need no weights, and returns what they were called with.
    Raises CheckpointError if the layer does not call them once a batch."""
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        calls.append((hidden_states.float(), top_k_index.long(), top_k_weights.float()))
        raise _Recorded

    fused = FusedExperts.of(layer)
    tokens = 0
    with _replaced(fused.module, forward):
        for part in decoder.batches(states):
            with contextlib.suppress(_Recorded):
                decoder.step(part, index)
            tokens += part.ids.numel()
    found = sum(len(inputs) for inputs, _, _ in calls)
    if found != tokens:
        raise CheckpointError(
            f"layer {index}: expected its experts to be called with {tokens} tokens, found {found}"
        )
    inputs, chosen, weights = (torch.cat(x) for x in zip(*calls, strict=True))
    return Routing.of(inputs, chosen, weights, experts)


def answered(decoder: Decoder, layer: nn.Module, states: States, index: int, outputs: torch.Tensor) -> States:
    """Runs the whole layer, with `outputs` [tokens, hidden] as what its routed experts answer."""
    done = 0

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        nonlocal done
        begin, done = done, done + len(hidden_states)
        return outputs[begin:done].to(hidden_states.dtype)

    with _replaced(FusedExperts.of(layer).module, forward):
        return decoder.run(layer, states, index)
