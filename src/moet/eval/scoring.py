"""Windows under two models, on the prefill path and on the decode path; one slice of logits at a time, per-window sums are kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moet.errors import EvalError
from moet.eval.measure import Scores, Sums, compare
from moet.eval.subject import Rows, Shape, Subject, Tokenizer
from moet.eval.text import Window

SLICE = 64
"""Tokens whose logits of both models are in memory at a time."""

Tick = Callable[[], None]


@dataclass(frozen=True)
class Scored:
    """A window's sums; bytes is 0 on a model's own text, where there is no text to count."""

    window: Window
    sums: Sums

    def as_dict(self) -> dict[str, Any]:
        return {"document": self.window.document, "domain": self.window.domain, **asdict(self.sums)}


@dataclass(frozen=True)
class Tokens:
    """ids: the window's tokens behind the start tokens. context: the first of them that are given, not scored. bytes: of the text of the others."""

    ids: list[int]
    context: int
    bytes: int


def tokens_of(window: Window, tokenizer: Tokenizer) -> Tokens:
    """Without a start token, the first token is context and its bytes do not count."""
    ids = tokenizer.start + tokenizer.encode(window.text)
    context = max(1, len(tokenizer.start))
    unscored = 0 if tokenizer.start else len(tokenizer.decode(ids[:1]).encode())
    return Tokens(ids, context, window.bytes - unscored)


def between(ids: Sequence[int], context: int, reference: Rows, candidate: Rows) -> Scores:
    """Scores of tokens `context` and on."""
    parts = []
    for first in range(context - 1, len(ids) - 1, SLICE):
        end = min(first + SLICE, len(ids) - 1)
        a, b = reference.logits(first, end), candidate.logits(first, end)
        try:
            parts.append(compare(a, b, torch.tensor(ids[first + 1 : end + 1])))
        except ValueError as e:
            raise EvalError(f"expected two models of one vocabulary and finite logits, found: {e}") from None
    return Scores.join(parts)


def prefill(reference: Subject, candidate: Subject, windows: Sequence[Window], tick: Tick, shapes: tuple[Shape, Shape] = ("plain", "plain")) -> list[Scored]:
    """Teacher-forced, each window in one request or pass. Both subjects may be the same one, in two shapes."""
    tokens = [tokens_of(w, reference.tokenizer) for w in windows]
    ids = [t.ids for t in tokens]
    rows = zip(windows, tokens, reference.prefill(ids, shapes[0]), candidate.prefill(ids, shapes[1]), strict=True)
    return list(_scored(rows, tick))


def _scored(rows: Any, tick: Tick) -> Iterator[Scored]:
    for window, t, a, b in rows:
        yield Scored(window, Sums.of(between(t.ids, t.context, a, b), t.bytes))
        tick()


def decode(reference: Subject, candidate: Subject, windows: Sequence[Window], tick: Tick, *, floor: bool = False) -> list[Scored]:
    """The decode path of the candidate, after half of the window's tokens.

    Both in memory: forced along the text, token by token on their KV caches. Otherwise a server writes on in its own words and the reference scores the same tokens by
    prefill. floor: the reference in the candidate's place, against its own prefill.
    """
    found = []
    for window in windows:
        t = tokens_of(window, reference.tokenizer)
        context = max(t.context, len(t.ids) // 2)
        ids, theirs = (reference if floor else candidate).decode(t.ids, context)
        if not floor and reference.decodes == candidate.decodes == "text":
            ours: Rows = reference.decode(ids, context)[1]
            scores = between(ids, context, ours, theirs)
        else:
            prefilled = reference.prefill([ids])
            scores = between(ids, context, next(prefilled), theirs)
        found.append(Scored(window, Sums.of(scores, 0)))
        tick()
    return found
