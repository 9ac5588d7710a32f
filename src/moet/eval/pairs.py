"""Two results of the same tasks, document by document: the first is the reference."""

from typing import Any

from moet.errors import EvalError
from moet.eval import stats
from moet.eval.report import Table, _interval, _share

Named = tuple[str, dict[str, Any]]


def paired(reference: Named, candidate: Named) -> Table:
    """A row a task and metric: McNemar's exact test where every outcome is right or wrong, a bootstrap interval of the difference elsewhere.

    Raises EvalError if the results have no task in common, or if a task's documents or prompts are not the same.
    """
    (a_name, a), (b_name, b) = reference, candidate
    rows, notes = [], []
    loss = b["parameters"]["loss"]
    for task in (t for t in a["samples"] if t in b["samples"]):
        if a["versions_of_tasks"].get(task) != b["versions_of_tasks"].get(task):
            raise EvalError(f"{task}: expected one version of the task, found {a['versions_of_tasks'].get(task)} and {b['versions_of_tasks'].get(task)}")
        x, y = _outcomes(a["samples"][task]), _outcomes(b["samples"][task])
        if x.keys() != y.keys():
            raise EvalError(f"{task}: expected the same documents and prompts in {a_name} and {b_name}, found {len(x.keys() ^ y.keys())} that only one of them has")
        for metric in sorted({m for scores in (*x.values(), *y.values()) for m in scores}):
            keys = [k for k in x if metric in x[k]]
            if alone := [k for k in x if (metric in x[k]) != (metric in y[k])]:
                raise EvalError(f"{task}, {metric}: expected it of the same documents in {a_name} and {b_name}, found {len(alone)} that only one of them has it of")
            row, note = _row(f"{task}, {metric}", [x[k][metric] for k in keys], [y[k][metric] for k in keys], loss)
            rows.append(row)
            notes.append(note)
    if not rows:
        raise EvalError(f"{a_name} and {b_name}: expected a task in both, found none")
    columns = ("task, metric", "documents", "reference", "candidate", "difference", "95 %", "lost", "won", "p")
    return Table(f"{b_name} against {a_name}, paired by document", columns, rows, tuple(notes))


def _outcomes(samples: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    return {(s["doc_id"], s.get("filter"), s.get("doc_hash"), s.get("prompt_hash")): s["scores"] for s in samples}


def _row(what: str, x: list[float], y: list[float], loss: float) -> tuple[tuple[str, ...], str]:
    n = len(x)
    difference = stats.ratio(y, [1.0] * n, minus=x)
    interval = {"low": difference.low, "high": difference.high} if difference.units >= stats.UNITS else {"low": None, "high": None}
    binary = all(v in (0.0, 1.0) for v in (*x, *y))
    if binary:
        test = stats.mcnemar([bool(v) for v in x], [bool(v) for v in y])
        power = stats.power_of_pairs(what, test, loss)
        tail = (str(test.lost), str(test.won), f"{test.p:.3g}")
        means = (_share(sum(x) / n), _share(sum(y) / n), f"{100 * difference.value:+.1f} points")
        return (what, str(n), *means, _interval(interval, "+.3f"), *tail), power.words
    p = stats.signed_rank([v - u for u, v in zip(x, y, strict=True)])
    means = (f"{sum(x) / n:.4f}", f"{sum(y) / n:.4f}", f"{difference.value:+.4f}")
    return (what, str(n), *means, _interval(interval, "+.4f"), "", "", f"{p:.3g}"), f"{what}: a mean, not a share; p is the signed-rank test's"
