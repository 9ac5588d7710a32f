"""Where a server gives only its most probable tokens: a comparison of what both lists name, and of the rest as one. Its KL is a lower bound of the whole vocabulary's."""

from dataclasses import dataclass

import numpy as np
import torch

from moet.eval.measure import Scores

LEAST_REST = 1e-5
"""Probability of "any other" below which it is taken to be this: what lists that name nearly everything leave over is a difference of float32 numbers, wrong by about
d = 6e-8, and adds d^2 / (2 rest) of noise to the KL, which stays below 2e-10."""


@dataclass(frozen=True)
class Top:
    """The most probable tokens of some positions, and the token that follows in the text whatever its rank.

    ids: int64 [t, n], in no order; -1 where a list is shorter. logprobs: float64 [t, n], natural; -inf there.
    """

    ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def of(cls, rows: list[dict[int, float]]) -> "Top":
        width = max(map(len, rows), default=0)
        ids, logprobs = np.full((len(rows), width), -1, np.int64), np.full((len(rows), width), -np.inf)
        for i, row in enumerate(rows):
            ids[i, : len(row)], logprobs[i, : len(row)] = list(row.keys()), list(row.values())
        return cls(ids, logprobs)

    @classmethod
    def of_logits(cls, logits: torch.Tensor, count: int, targets: torch.Tensor) -> "Top":
        """The same of whole-vocabulary logits, float [t, vocab]; targets: int64 [t]."""
        values = logits.double().log_softmax(-1)
        if values.isnan().any():
            raise ValueError("toplist: expected logits that are numbers, found NaN")
        top = values.topk(min(count, values.shape[-1]))
        extra = values.gather(1, targets[:, None].to(values.device)).masked_fill((top.indices == targets[:, None].to(values.device)).any(1, keepdim=True), -torch.inf)
        ids = torch.cat([top.indices, torch.where(extra.isinf(), -1, targets[:, None].to(values.device))], 1)
        return cls(ids.cpu().numpy(), torch.cat([top.values, extra], 1).cpu().numpy())

    def part(self, first: int, end: int) -> "Top":
        return Top(self.ids[first:end], self.logprobs[first:end])


class ListedRows:
    """A window of which only lists are known: what follows tokens `offset` and on."""

    def __init__(self, values: Top, offset: int = 0) -> None:
        self.values, self.offset = values, offset

    def top(self, first: int, end: int) -> Top:
        return self.values.part(first - self.offset, end - self.offset)


def compare(reference: Top, candidate: Top, targets: np.ndarray) -> Scores:
    """`measure.compare` of lists. kl: of the distributions over the tokens that both lists name and one event "any other", which merging events can only make smaller
    (the data-processing inequality). targets: int64 [t], each of them in both lists. Raises ValueError if one is not, or if the lengths differ."""
    if not len(reference.ids) == len(candidate.ids) == len(targets):
        raise ValueError(f"toplist: expected as many positions three times, found {len(reference.ids)}, {len(candidate.ids)} and {len(targets)}")
    kl, nll = np.empty(len(targets)), np.empty((2, len(targets)))
    best = [top.ids[np.arange(len(targets)), top.logprobs.argmax(1)] if len(targets) else np.empty(0, np.int64) for top in (reference, candidate)]
    for i, target in enumerate(targets):
        p, q = (dict(zip(top.ids[i][top.ids[i] >= 0].tolist(), top.logprobs[i][top.ids[i] >= 0].tolist(), strict=True)) for top in (reference, candidate))
        if target not in p or target not in q:
            raise ValueError(f"toplist: expected the log-probability of the next token, {target}, found {len(p)} and {len(q)} others")
        nll[:, i] = -p[target], -q[target]
        common = [t for t in p if t in q and p[t] > -np.inf]
        a, b = np.array([p[t] for t in common]), np.array([q[t] for t in common])
        rest = [np.log(max(LEAST_REST, 1 - np.exp(x).sum())) for x in (a, b)]
        kl[i] = _divergence(np.append(a, rest[0]), np.append(b, rest[1]))
    return Scores(kl, best[0] == best[1], *nll, best[0] == targets, best[1] == targets)


def _divergence(a: np.ndarray, b: np.ndarray) -> float:
    """sum p ln(p / q) - p + q of two lists of log-probabilities: KL where both add up to 1, and of second order in what float32 rounds them by where they do not quite."""
    return float((np.exp(a) * (np.expm1(b - a) - (b - a))).sum())
