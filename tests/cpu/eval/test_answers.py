"""Greedy divergence, token inflation, validity, accepted drafts: from answers that are written here."""

import json

import pytest

from moet.errors import EvalError
from moet.eval import answers, prompts
from moet.eval.subject import Answer, Prompt
from moet.eval.validity import valid

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
ASK = Prompt("p", "d", messages=({"role": "user", "content": "?"},), tools=(TOOL,))
JSON = Prompt("p", "d", text="?", schema={"type": "object", "required": ["x"]})


def answer(ids, stopped=True, text="", calls=None, drafts=None):
    return Answer(tuple(ids), text, stopped, calls, drafts)


@pytest.mark.parametrize(
    "a, b, point",
    [
        (answer([1, 2, 3]), answer([1, 2, 3]), None),
        (answer([1, 2, 3]), answer([1, 9, 3]), 1),
        (answer([1, 2]), answer([1, 2, 3]), 2),
        (answer([1, 2], stopped=False), answer([1, 2]), 2),
        (answer([]), answer([5]), 0),
    ],
)
def test_parting(a, b, point):
    assert answers.parting(a, b) == answers.parting(b, a) == point


def test_divergence():
    same, early, late = (answer([1, 2, 3]), answer([1, 2, 3])), (answer([1, 2, 3]), answer([9])), (answer([1, 2, 3]), answer([1, 2, 4]))
    found = answers.divergence([(ASK, *p) for p in (same, early, late)])
    assert found == {"equal": 1, "of": 3, "median": 2, "earliest": 0, "per_token": 2 / (4 + 1 + 3)}
    assert answers.divergence([(ASK, *p) for p in (same, same, late)])["median"] is None


def test_inflation():
    pairs = [(ASK, answer(range(10 + i)), answer(range(12 + i))) for i in range(8)]
    found = answers.length(pairs, seed=0)
    assert found["inflation"].value == pytest.approx(sum(12 + i for i in range(8)) / sum(10 + i for i in range(8)))
    assert found["inflation"].low > 1 and found["signed_rank_p"] == pytest.approx(2 / 2**8)
    cut = [(ASK, answer(range(64), stopped=False), answer(range(64), stopped=False))]
    assert answers.length(cut, seed=0) == {"compared": 0, "cut_off_on_both_sides": 1}


@pytest.mark.parametrize(
    "prompt, found, is_valid",
    [
        (ASK, answer([], calls=(("add", '{"a": 1}'),)), True),
        (ASK, answer([], calls=(("add", '{"a": 1}'), ("add", '{"a": "1"}'))), False),
        (ASK, answer([], calls=(("sub", '{"a": 1}'),)), False),
        (ASK, answer([], calls=(("add", '{"a": 1'),)), False),
        (ASK, answer([], calls=()), False),
        (ASK, answer([]), None),
        (JSON, answer([], text=' {"x": 1}\n'), True),
        (JSON, answer([], text='{"y": 1}'), False),
        (JSON, answer([], text='Sure! {"x": 1}'), False),
        (Prompt("p", "d", text="?"), answer([], text="{}"), None),
    ],
)
def test_valid(prompt, found, is_valid):
    assert valid(prompt, found) is is_valid


def test_summary():
    right, wrong = (("add", '{"a": 1}'),), (("add", "{}"),)
    pairs = [(ASK, answer([1], calls=right, drafts=(4, 4, 3)), answer([1], calls=right if i else wrong, drafts=(4, 4, 2))) for i in range(10)]
    found, said = answers.summarise(pairs, 16, 0, 0.02)
    assert (found["validity"]["reference"], found["validity"]["candidate"]) == (1.0, 0.9)
    assert found["validity"]["mcnemar"]["lost"] == 1 and found["validity"]["mcnemar"]["p"] == 1.0
    assert len(said) == 1 and "COULD NOT HAVE CAUGHT a loss of 2 points" in said[0]
    assert found["mtp"]["reference"]["acceptance"].value == 0.75 and found["mtp"]["candidate"]["tokens_per_step"] == 1.5
    assert "not_judged" not in found
    found, said = answers.summarise([(ASK, answer([1]), answer([1]))], 16, 0, 0.02)
    assert found["not_judged"].startswith("1 prompts") and not said and "mtp" not in found


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "kind": "tools"}) + "\n" + json.dumps({"prompt": "x", "schema": {}}) + "\n")
    first, second = prompts.read(path)
    assert (first.domain, first.tools, first.schema) == ("tools", (TOOL,), None)
    assert (second.domain, second.text, second.schema) == ("prompts", "x", {})


@pytest.mark.parametrize(
    "row, message",
    [("{}", "messages"), ("nonsense", "JSON object"), ('{"prompt": "x", "schema": {"type": "objekt"}}', "prompts.jsonl:1: expected a JSON schema"), ("", "found none")],
)
def test_prompt_files_are_checked(tmp_path, row, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(row)
    with pytest.raises(EvalError, match=message):
        prompts.read(path)
