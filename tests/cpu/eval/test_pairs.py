"""Two results of the same tasks, paired by document."""

import copy
import math

import pytest

from moet.errors import EvalError
from moet.eval import report
from moet.eval.pairs import paired


def result(right: list[bool]) -> dict:
    samples = [{"doc_id": i, "filter": "none", "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "scores": {"acc": float(x)}} for i, x in enumerate(right)]
    value = sum(right) / len(right)
    return {
        "kind": "tasks", "candidate": {"name": "http://x", "mode": "base", "fingerprint": ""}, "parameters": {"loss": 0.02}, "versions_of_tasks": {"t": 1.0},
        "tasks": {"t": {"acc": {"value": value, "stderr": None, "documents": len(right)}}}, "power": [], "samples": {"t": samples},
    }  # fmt: skip


def test_mcnemar_by_document():
    a, b = result([True] * 30 + [False] * 10), result([True] * 24 + [False] * 6 + [True] * 1 + [False] * 9)
    table = paired(("a", a), ("b", b))
    (row,) = table.rows
    cells = dict(zip(table.columns, row, strict=True))
    assert (cells["lost"], cells["won"], cells["documents"]) == ("6", "1", "40")
    assert float(cells["p"]) == pytest.approx(2 * (math.comb(7, 0) + math.comb(7, 1)) / 2**7)
    assert cells["difference"] == "-12.5 points"
    assert "COULD NOT HAVE CAUGHT a loss of 2 points" in table.notes[0]


def test_a_report_of_two_pairs_them():
    a, b = result([True, False] * 8), result([True, True] * 8)
    assert len(report.tables([("a", a)])) == 1
    assert "paired by document" in report.markdown([("a", a), ("b", b)])


def test_what_is_not_the_same_is_refused():
    a = result([True] * 8)
    other = copy.deepcopy(a)
    other["samples"]["t"][3]["prompt_hash"] = "another"
    with pytest.raises(EvalError, match="the same documents and prompts in a and b, found 2"):
        paired(("a", a), ("b", other))
    other = copy.deepcopy(a)
    other["versions_of_tasks"]["t"] = 2.0
    with pytest.raises(EvalError, match="one version of the task"):
        paired(("a", a), ("b", other))
    other = copy.deepcopy(a)
    other["samples"] = {"u": other["samples"].pop("t")}
    with pytest.raises(EvalError, match="a task in both"):
        paired(("a", a), ("b", other))
