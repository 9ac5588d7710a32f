"""Two models' scores of the same tokens, compared token by token over the whole vocabulary; and the sums that tables are made of.

    kl         sum over the vocabulary of p (ln p - ln q), p the reference's probabilities, q the candidate's; nats
    agree      the two most probable tokens are the same one
    nll        -ln p(next token of the text); nats
    bits/byte  sum of nll / ln 2 / bytes of the text (not tokens, so that it can be compared across tokenizers)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch

SLICE_BYTES = 256 << 20
"""Working memory of `compare` for each of its float64 arrays."""


@dataclass(frozen=True)
class Scores:
    """One number a token and quantity; every array is float64 or bool, [tokens].

    kl        KL(reference || candidate), nats
    agree     the same token is the most probable one
    ref_nll   -ln p of the next token under the reference, nats; cand_nll under the candidate
    ref_hit   the reference's most probable token is the next token of the text; cand_hit the candidate's
    """

    kl: np.ndarray
    agree: np.ndarray
    ref_nll: np.ndarray
    cand_nll: np.ndarray
    ref_hit: np.ndarray
    cand_hit: np.ndarray

    def __len__(self) -> int:
        return len(self.kl)

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        parts = list(parts)
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))


def compare(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Scores of tokens whose logits (or log-probabilities) are known under both models.

    reference, candidate: float [.., vocab], any device, of equal shape; targets: int64 [..], the token that follows each position in the text. Normalised and summed
    in float64, because a float32 log-softmax over 150,000 tokens is wrong by more than the noise floor; in slices of SLICE_BYTES. Tokens with probability 0 under the
    reference add nothing; one that only the candidate excludes makes kl infinite. Ties for the most probable token go to the smallest id.
    Raises ValueError if the shapes differ or a logit is NaN.
    """
    if reference.shape != candidate.shape or reference.shape[:-1] != targets.shape:
        raise ValueError(
            f"compare: expected logits [.., vocab] twice and targets [..], found {tuple(reference.shape)}, {tuple(candidate.shape)} and {tuple(targets.shape)}"
        )
    vocab = reference.shape[-1]
    reference, candidate, targets = reference.reshape(-1, vocab), candidate.reshape(-1, vocab), targets.reshape(-1)
    step = max(1, SLICE_BYTES // (8 * vocab))
    parts = [_slice(reference[i : i + step], candidate[i : i + step], targets[i : i + step]) for i in range(0, len(targets), step)]
    return Scores.join(parts) if parts else Scores(*(np.empty(0, bool if f.name in ("agree", "ref_hit", "cand_hit") else float) for f in fields(Scores)))


def _slice(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Scores:
    p, q = reference.double().log_softmax(-1), candidate.to(reference.device).double().log_softmax(-1)
    targets = targets.to(p.device)
    if p.isnan().any() or q.isnan().any():
        raise ValueError("compare: expected logits that are numbers, found NaN")
    terms = p.exp().mul_(p - q).masked_fill_(p == -torch.inf, 0.0)
    top_p, top_q = p.argmax(-1), q.argmax(-1)
    nll = [-x.gather(1, targets[:, None])[:, 0] for x in (p, q)]
    return Scores(*(x.cpu().numpy() for x in (terms.sum(-1), top_p == top_q, *nll, top_p == targets, top_q == targets)))


@dataclass(frozen=True)
class Sums:
    """A window's scores, added up: what intervals are computed from and what result files keep of it.

    tokens, bytes: how many were scored, and the UTF-8 bytes of the text that they are. kl, ref_nll, cand_nll: nats. agree, ref_hits, cand_hits: tokens.
    """

    tokens: int
    bytes: int
    kl: float
    agree: int
    ref_nll: float
    cand_nll: float
    ref_hits: int
    cand_hits: int
    worst_kl: float

    @classmethod
    def of(cls, scores: Scores, text_bytes: int) -> Self:
        return cls(
            len(scores), text_bytes, float(scores.kl.sum()), int(scores.agree.sum()), float(scores.ref_nll.sum()), float(scores.cand_nll.sum()),
            int(scores.ref_hit.sum()), int(scores.cand_hit.sum()), float(scores.kl.max(initial=-math.inf)),
        )  # fmt: skip


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Compressed size of the text under the model, in bits a byte of UTF-8."""
    return nats / math.log(2) / text_bytes


def perplexity(nats: float, tokens: int) -> float:
    """exp of the mean nll of a token. Comparable between models of one tokenizer only."""
    return math.exp(nats / tokens) if nats / tokens < 700 else math.inf  # which a float64 cannot hold
