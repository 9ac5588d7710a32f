"""Windows under two models, on the prefill path and on the decode path; one slice of logits at a time, per-window sums are kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moet.errors import EvalError
from moet.eval import toplist
from moet.eval.measure import Scores, Sums, compare
from moet.eval.subject import Rows, Shape, Subject, Tokenizer
from moet.eval.text import Window
from moet.eval.toplist import ListedRows, Top

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


def between(ids: Sequence[int], context: int, reference: Rows | ListedRows, candidate: Rows | ListedRows, top: int = 0) -> Scores:
    """Scores of tokens `context` and on. top: of each model, the number of tokens that are compared by name; 0: the whole vocabulary."""
    parts = []
    for first in range(context - 1, len(ids) - 1, SLICE):
        end = min(first + SLICE, len(ids) - 1)
        targets = torch.tensor(ids[first + 1 : end + 1])
        try:
            if top:
                parts.append(toplist.compare(*(_listed(rows, first, end, top, targets) for rows in (reference, candidate)), targets.numpy()))
            else:
                parts.append(compare(*(rows.logits(first, end) for rows in (reference, candidate)), targets))
        except ValueError as e:
            raise EvalError(f"expected two models of one vocabulary and finite logits, found: {e}") from None
    return Scores.join(parts)


def _listed(rows: Rows | ListedRows, first: int, end: int, top: int, targets: torch.Tensor) -> Top:
    return rows.top(first, end) if isinstance(rows, ListedRows) else Top.of_logits(rows.logits(first, end), top, targets)


def prefill(reference: Subject, candidate: Subject, windows: Sequence[Window], tick: Tick, top: int = 0, shapes: tuple[Shape, Shape] = ("plain", "plain")) -> list[Scored]:
    """Teacher-forced, each window in one request or pass. Both subjects may be the same one, in two shapes."""
    tokens = [tokens_of(w, reference.tokenizer) for w in windows]
    ids = [t.ids for t in tokens]
    rows = zip(windows, tokens, reference.prefill(ids, shapes[0]), candidate.prefill(ids, shapes[1]), strict=True)
    return list(_scored(rows, tick, top))


def _scored(rows: Any, tick: Tick, top: int) -> Iterator[Scored]:
    for window, t, a, b in rows:
        yield Scored(window, Sums.of(between(t.ids, t.context, a, b, top), t.bytes))
        tick()


def decode(reference: Subject, candidate: Subject, windows: Sequence[Window], tick: Tick, top: int = 0, *, floor: bool = False) -> list[Scored]:
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
            scores = between(ids, context, ours, theirs, top)
        else:
            prefilled = reference.prefill([ids])
            scores = between(ids, context, next(prefilled), theirs, top)
        found.append(Scored(window, Sums.of(scores, 0)))
        tick()
    return found
