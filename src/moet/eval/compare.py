"""The whole comparison: sameness, both paths on short and long windows, the noise floor, answers, and what the sample could not have shown."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from moet.errors import EvalError
from moet.eval import answers, result, sameness, scoring, summary, text
from moet.eval.parameters import Parameters
from moet.eval.scoring import Scored
from moet.eval.subject import Prompt, Subject

Stage = Callable[[str, int], Callable[[], None]]
"""(what, how many) -> called after each one."""


def compare(
    reference: Subject, candidate: Subject, documents: Sequence[text.Document], prompts: Sequence[Prompt], parameters: Parameters, stage: Stage, max_kl: float | None = None
) -> dict[str, Any]:
    """The result, ready for JSON. prompts: asked of both; without any, windows are continued. max_kl: nats a token; the gate that the claims hold.

    Raises EvalError: two different things, no text, nothing to do, or a subject that does not say what is needed.
    """
    p = parameters
    facts = sameness.check(reference, candidate)
    short = text.windows(documents, p.short_bytes, p.short, whole=True, seed=p.seed)
    long = text.windows(documents, p.long_bytes, p.long, whole=False, seed=p.seed)
    if not short and not long and not prompts:
        raise EvalError("expected windows to score or prompts to answer, found none: --short and --long are 0, or the text is empty")
    if not (short or long) and not (candidate.decodes and reference.decodes):
        raise EvalError("expected windows to score, because --stream gives no answers, found none: --short and --long are 0; leave --stream out")
    if max_kl is not None and not (short or long):
        raise EvalError("--max-kl: expected windows that KL is measured on, found none: --short and --long are 0, or the text is too short")
    asked = list(prompts or answers.prompts_of(short))[: p.answers] if candidate.decodes and reference.decodes else []
    _check_lengths([*short, *long], asked, p.max_tokens, reference, candidate)
    paths: dict[str, dict[str, Any]] = {}
    raw: dict[str, Any] = {}
    power: list[str] = []

    def keep(name: str, scored: list[Scored], floor: list[Scored], seen: str) -> None:
        listed = f"the {p.top} most probable tokens of each, any other as one: KL is a lower bound" if p.top else "whole"
        paths[name] = {"measured": seen, "vocabulary": listed, **summary.with_domains(scored, p.seed, floor)}
        raw[name] = {"windows": [s.as_dict() for s in scored], "floor": [s.as_dict() for s in floor]}
        chance = summary.accuracy_power(name, paths[name], p.loss)
        paths[name]["power"] = asdict(chance)
        power.append(chance.words)

    for name, windows in (("prefill-short", short), ("prefill-long", long)):
        if windows:
            scored = scoring.prefill(reference, candidate, windows, stage(name, len(windows)), p.top)
            few = windows[: max(1, len(windows) // 4)]
            floor = scoring.prefill(reference, reference, few, stage(f"{name}, noise floor", len(few)), p.top, ("plain", "other"))
            keep(name, scored, floor, "teacher-forced, each window in one piece")
    decoded = short[: p.decode] or long[: p.decode]
    if decoded and candidate.decodes:
        seen = {
            ("text", "text"): "teacher-forced, token by token on both KV caches",
            ("text", "own"): "teacher-forced, token by token on the candidate's KV cache; the reference by prefill",
        }.get((candidate.decodes, reference.decodes), "the candidate's own text, sampled at temperature 1; the reference scores it by prefill")
        scored = scoring.decode(reference, candidate, decoded, stage("decode", len(decoded)), p.top)
        few = decoded[: max(1, len(decoded) // 4)] if reference.decodes else []
        floor = scoring.decode(reference, reference, few, stage("decode, noise floor", len(few)), p.top, floor=True) if few else []
        keep("decode", scored, floor, seen)
    said: dict[str, Any] | None = None
    if asked:
        pairs = answers.ask(reference, candidate, asked, p.max_tokens, stage("answers", len(asked)))
        said, words = answers.summarise(pairs, p.max_tokens, p.seed, p.loss)
        power += words
        raw["answers"] = answers.raw(pairs)
    return summary.plain({
        "kind": "compare", **result.provenance(), "mode": f"{candidate.card.mode} against {reference.card.mode}",
        "reference": reference.card.as_dict(), "candidate": candidate.card.as_dict(), "sameness": facts, "parameters": asdict(p),
        "paths": paths, "answers": said, "power": power, "claims": claims(paths, said, max_kl), "samples": raw,
    })  # fmt: skip


def _check_lengths(windows: Sequence[text.Window], prompts: Sequence[Prompt], max_tokens: int, *subjects: Subject) -> None:
    """A position past what a model was made for is no measurement; a server would refuse it half an hour later."""
    limit, tokenizer = min((n for s in subjects if (n := s.card.details.get("max_model_len"))), default=None), subjects[0].tokenizer
    if limit is None:
        return
    longest = max((len(scoring.tokens_of(w, tokenizer).ids) + 1 for w in windows), default=0)
    if longest > limit:
        raise EvalError(f"windows: expected at most {limit} tokens, which is what the models take, found {longest}; make --long-bytes or --short-bytes smaller")
    for prompt in prompts:
        words = tokenizer.render(list(prompt.messages), list(prompt.tools) or None) if prompt.messages else prompt.text
        if (found := len(tokenizer.start) + len(tokenizer.encode(words)) + max_tokens) > limit:
            raise EvalError(
                f"{prompt.name}: expected prompt and answer to have at most {limit} tokens, which is what the models take, found {found} with the "
                f"--max-tokens {max_tokens} of the answer; make that smaller, or the prompt shorter"
            )


def claims(paths: dict[str, Any], said: dict[str, Any] | None, max_kl: float | None) -> list[dict[str, Any]]:
    found = []
    for name, s in paths.items():
        found.append(result.claim(f"kl.{name}", f"{name}: KL from the reference", s["kl"].value, "nats a token", max_kl, "<="))
        found.append(result.claim(f"top1.{name}", f"{name}: same most probable token", s["agreement"].value, "", None, ">="))
        if "bits_per_byte_difference" in s:
            found.append(result.claim(f"bpb.{name}", f"{name}: bits a byte more than the reference", s["bits_per_byte_difference"].value, "bits", None, "<="))
    if said:
        d = said["divergence"]
        found.append(result.claim("greedy.equal", "greedy answers equal to the reference's", d["equal"], f"of {d['of']}", None, ">="))
        for side, m in (said.get("mtp") or {}).items():
            if m:
                found.append(result.claim(f"mtp.{side}", f"{side}: accepted MTP drafts", m["acceptance"].value, "", None, ">="))
    return found
