"""Greedy answers of both to the same prompts: where they part, how long they are, whether they are valid, and how many drafts were accepted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moet.eval import stats
from moet.eval.subject import Answer, Prompt, Subject
from moet.eval.text import Window
from moet.eval.validity import valid

Pair = tuple[Prompt, Answer, Answer]


def prompts_of(windows: Sequence[Window]) -> list[Prompt]:
    """The first halves of windows, for greedy continuation where no prompts were given."""
    return [Prompt(w.document, w.domain, text=w.text[: len(w.text) // 2].rstrip()) for w in windows]


def ask(reference: Subject, candidate: Subject, prompts: Sequence[Prompt], max_tokens: int, tick: Callable[[], None]) -> list[Pair]:
    """One prompt at a time, so that every run forms the same steps."""
    pairs = []
    for prompt in prompts:
        pairs.append((prompt, reference.answer(prompt, max_tokens), candidate.answer(prompt, max_tokens)))
        tick()
    return pairs


def summarise(pairs: Sequence[Pair], max_tokens: int, seed: int, loss: float) -> tuple[dict[str, Any], list[str]]:
    """Everything that answers tell, and the sentences on power."""
    result: dict[str, Any] = {"prompts": len(pairs), "max_tokens": max_tokens, "divergence": divergence(pairs), "length": length(pairs, seed)}
    said: list[str] = []
    outcomes = [(valid(p, a), valid(p, b)) for p, a, b in pairs]
    judged = [(a, b) for a, b in outcomes if a is not None and b is not None]
    if judged:
        test = stats.mcnemar([a for a, _ in judged], [b for _, b in judged])
        power = stats.power_of_pairs("valid JSON and tool calls", test, loss)
        rates = {"reference": sum(a for a, _ in judged) / len(judged), "candidate": sum(b for _, b in judged) / len(judged)}
        result["validity"] = {**rates, "difference": test.difference, "mcnemar": asdict(test), "power": asdict(power)}
        said.append(power.words)
    unjudged = sum(bool(p.tools or p.schema) for p, _, _ in pairs) - len(judged)
    if unjudged:
        result["not_judged"] = f"{unjudged} prompts with tools: only a server's parser finds tool calls"
    drafts = {side: acceptance([pair[i] for pair in pairs], seed) for side, i in (("reference", 1), ("candidate", 2))}
    if any(drafts.values()):
        result["mtp"] = drafts
    return result, said


def divergence(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Index of the first token at which the answers differ; an answer that stops counts as one with a stop token. Equal answers have none.

    median: of all, null if more than half are equal. per_token: partings a token on which they could part, the maximum-likelihood hazard of a constant one.
    """
    points = [parting(a, b) for _, a, b in pairs]
    parted = sorted(p for p in points if p is not None)
    exposed = sum(len(a.ids) + a.stopped if p is None else p + 1 for p, (_, a, _) in zip(points, pairs, strict=True))
    half = (len(points) - 1) // 2
    return {
        "equal": len(points) - len(parted), "of": len(points), "median": parted[half] if half < len(parted) else None,
        "earliest": parted[0] if parted else None, "per_token": len(parted) / exposed if exposed else None,
    }  # fmt: skip


def parting(a: Answer, b: Answer) -> int | None:
    """Index of the first token that differs, None if none does."""
    x, y = list(a.ids) + [-1] * a.stopped, list(b.ids) + [-1] * b.stopped
    for i, (s, t) in enumerate(zip(x, y, strict=False)):
        if s != t:
            return i
    return None if len(x) == len(y) else min(len(x), len(y))


def length(pairs: Sequence[Pair], seed: int) -> dict[str, Any]:
    """Token inflation: tokens of the candidate's answers over the reference's, ratio of sums with a paired bootstrap interval, and Wilcoxon's signed-rank test.

    Answers cut off by max_tokens on both sides say nothing and are only counted.
    """
    told = [(len(a.ids), len(b.ids)) for _, a, b in pairs if a.stopped or b.stopped]
    result: dict[str, Any] = {"compared": len(told), "cut_off_on_both_sides": len(pairs) - len(told)}
    if not told or not sum(a for a, _ in told):
        return result
    x, y = np.array(told, float).T
    inflation = stats.ratio(y, x, seed=seed)
    power = stats.power_of_interval("answers' length", inflation, 0.1, least_error=1 / x.sum())
    detectable = f"the least change it finds with a power of 80% is {100 * power.detectable:.3g} %" if math.isfinite(power.detectable) else "it finds no change"
    result |= {"reference_tokens": int(x.sum()), "candidate_tokens": int(y.sum()), "inflation": inflation, "signed_rank_p": stats.signed_rank(y - x)}
    result["power"] = f"a change of 10 % would have been found with probability {power.power:.2f}; {detectable}"
    return result


def acceptance(answers: Sequence[Answer], seed: int) -> dict[str, Any] | None:
    """Of vLLM's counters: share of drafted tokens that were accepted, and tokens a step. Other clients of the server would count too."""
    rows = np.array([a.drafts for a in answers if a.drafts and a.drafts[0]], float)
    if not len(rows):
        return None
    steps, drafted, accepted = rows.T
    return {"acceptance": stats.ratio(accepted, drafted, seed=seed), "tokens_per_step": 1 + float(accepted.sum() / steps.sum()), "drafts": int(steps.sum())}


def raw(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """What a result file keeps of each prompt."""
    return [
        {
            "prompt": p.name, "domain": p.domain, "parting": parting(a, b), "valid": [valid(p, a), valid(p, b)],
            "tokens": [len(a.ids), len(b.ids)], "stopped": [a.stopped, b.stopped], "texts": [a.text, b.text], "calls": [a.calls, b.calls],
        }
        for p, a, b in pairs
    ]  # fmt: skip
