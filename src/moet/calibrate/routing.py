"""What a layer's routed experts are given, token by token, and giving the layer what they should have answered."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moet.errors import CheckpointError
from moet.forward import Decoder, States
from moet.forward.experts import FusedExperts


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

    def of_expert(self, expert: int) -> torch.Tensor:
        """int64: the tokens of an expert, ascending."""
        return self.tokens[self.starts[expert] : self.starts[expert + 1]]

    def weight_sums(self) -> torch.Tensor:
        """float32 [tokens]: of each token's router weights."""
        by_token = torch.argsort(self.tokens, stable=True)  # index_add_ adds in no fixed order on a GPU
        return self.weights[by_token].view(len(self.inputs), -1).sum(1)

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


def record(
    decoder: Decoder, layer: nn.Module, states: States, index: int, experts: int
) -> tuple[Routing, States]:
    """Runs the layer with experts that answer zeros, and need no weights. Returns what they were called with, and the
    states after the layer without their answer. Raises CheckpointError if the layer does not call them once a batch."""
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        calls.append((hidden_states.float(), top_k_index.long(), top_k_weights.float()))
        return torch.zeros_like(hidden_states)

    with _replaced(FusedExperts.of(layer).module, forward):
        rest = decoder.run(layer, states, index)
    found = sum(len(inputs) for inputs, _, _ in calls)
    if found != states.ids.numel():
        raise CheckpointError(
            f"layer {index}: expected its experts to be called with {states.ids.numel()} tokens, found {found}"
        )
    inputs, chosen, weights = (torch.cat(x) for x in zip(*calls, strict=True))
    return Routing.of(inputs, chosen, weights, experts), rest


def adds(decoder: Decoder, layer: nn.Module, states: States, index: int) -> bool:
    """Whether the layer's output is that of its other parts plus its experts' answer: tried on a few tokens. Not so where
    a norm follows the experts, or where the layer mixes several residual streams."""
    part = next(decoder.batches(states))
    answers = []

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        answers.append(hidden_states * answers[0] if answers else torch.ones_like(hidden_states[:1]))
        return answers[-1].expand_as(hidden_states)

    with _replaced(FusedExperts.of(layer).module, forward):
        one, other = (decoder.step(part, index).hidden for _ in range(2))
    if one.dim() != 3:
        return False
    expected = (answers[1] - answers[0]).view(one.shape)
    return bool((other - one - expected).abs().max() <= 1e-3 * expected.abs().max())


def answered(decoder: Decoder, layer: nn.Module, states: States, index: int, outputs: torch.Tensor) -> States:
    """Runs the whole layer, with `outputs` [tokens, hidden] as what its routed experts answer."""
    done = 0

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        nonlocal done
        begin, done = done, done + len(hidden_states)
        return outputs[begin:done].to(hidden_states.dtype)

    with _replaced(FusedExperts.of(layer).module, forward):
        return decoder.run(layer, states, index)
