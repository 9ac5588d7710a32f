"""Per-window sums -> means with intervals, for all windows and for each domain."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moet.eval.measure import Sums, bits_per_byte, perplexity
from moet.eval.scoring import Scored
from moet.eval.stats import Interval, Power, power_of_interval, ratio

UNITS = 20
"""Fewer documents than this are not resampled; then their windows are."""
BITS = 0.6931471805599453  # ln 2


def units_of(scored: Sequence[Scored]) -> tuple[str, list[list[Scored]]]:
    """What is resampled: documents, whose windows are not independent of each other; or windows, where the documents are too few."""
    by_document: dict[tuple[str, str], list[Scored]] = {}
    for s in scored:
        by_document.setdefault((s.window.domain, s.window.document), []).append(s)
    if len(by_document) >= UNITS:
        return "document", list(by_document.values())
    return "window", [[s] for s in scored]


def summarise(scored: Sequence[Scored], seed: int, floor: Sequence[Scored] = ()) -> dict[str, Any]:
    """All numbers of one path and length. kl and bits in nats a token and bits a byte, agreement and accuracy as shares; `floor_kl`: reference against itself."""
    unit, groups = units_of(scored)

    def column(name: str) -> list[float]:
        return [sum(getattr(s.sums, name) for s in group) for group in groups]

    tokens = column("tokens")
    total = Sums(*(sum(getattr(s.sums, f) for s in scored) for f in Sums.__dataclass_fields__))
    result: dict[str, Any] = {
        "windows": len(scored), "unit": unit, "units": len(groups), "tokens": total.tokens, "bytes": total.bytes,
        "kl": ratio(column("kl"), tokens, seed=seed),
        "worst_kl": max(s.sums.worst_kl for s in scored),
        "agreement": ratio(column("agree"), tokens, seed=seed),
        "perplexity": {"reference": perplexity(total.ref_nll, total.tokens), "candidate": perplexity(total.cand_nll, total.tokens)},
        "accuracy": {"reference": total.ref_hits / total.tokens, "candidate": total.cand_hits / total.tokens},
        "accuracy_difference": ratio(column("cand_hits"), tokens, minus=column("ref_hits"), seed=seed),
    }  # fmt: skip
    if total.bytes:
        size = [b * BITS for b in column("bytes")]
        result["bits_per_byte"] = {"reference": bits_per_byte(total.ref_nll, total.bytes), "candidate": bits_per_byte(total.cand_nll, total.bytes)}
        result["bits_per_byte_difference"] = ratio(column("cand_nll"), size, minus=column("ref_nll"), seed=seed)
    if floor:
        result["floor_kl"] = sum(s.sums.kl for s in floor) / sum(s.sums.tokens for s in floor)
        result["floor_worst_kl"] = max(s.sums.worst_kl for s in floor)
        result["at_noise_floor"] = at_floor(result["kl"].value, result["floor_kl"])
    return result


FLOOR_TIMES = 10.0
"""How many times the floor a KL may be and still be called noise: two different implementations differ by more than one does from itself in two batch shapes."""
FLOOR_KL = 1e-9
"""Nats a token that float32 models cannot be told apart by, whatever the floor: (1e-5)^2 and some, the square of a usual float32 difference of logits."""


def at_floor(kl: float, floor: float) -> bool:
    return abs(kl) <= max(FLOOR_TIMES * abs(floor), FLOOR_KL)


def with_domains(scored: Sequence[Scored], seed: int, floor: Sequence[Scored] = ()) -> dict[str, Any]:
    """`summarise` of everything, and of each domain under "domains" if there is more than one."""
    result = summarise(scored, seed, floor)
    domains = dict.fromkeys(s.window.domain for s in scored)
    if len(domains) > 1:
        result["domains"] = {d: summarise([s for s in scored if s.window.domain == d], seed, [s for s in floor if s.window.domain == d]) for d in domains}
    return result


def accuracy_power(what: str, path: dict[str, Any], loss: float) -> Power:
    """Of the paired difference of top-1 accuracy, with the error of at least one token that differs."""
    return power_of_interval(f"{what}, top-1 accuracy of the next token", path["accuracy_difference"], loss, least_error=1 / path["tokens"])


def plain(value: Any) -> Any:
    """For JSON: dataclasses as objects, what is not finite as null."""
    if isinstance(value, Interval):
        value = asdict(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return None
    return value
