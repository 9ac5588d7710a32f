"""The text that moet calibrates with, and the held-out text: complete, well formed, nothing twice, nothing shared."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "src" / "moet" / "calibrate" / "text"
HELDOUT = ROOT / "benchmarks" / "data" / "heldout"
KINDS = ("prose", "code", "languages")
SHARED = 80  # characters: longer runs in common are a copy; shorter ones are phrases of a language or of a format


def conversations(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def calibration() -> dict[str, list[str]]:
    texts = {kind: [p.read_text("utf-8") for p in sorted((TEXT / kind).glob("*.txt"))] for kind in KINDS}
    return texts | {"chat": [spoken(c) for c in conversations(TEXT / "chat.jsonl")]}


def heldout() -> dict[str, list[str]]:
    texts = {kind: [c["text"] for c in conversations(HELDOUT / f"{kind}.jsonl")] for kind in KINDS}
    return texts | {"chat": [spoken(c) for c in conversations(HELDOUT / "chat.jsonl")]}


def spoken(conversation: dict) -> str:
    return "\n\n".join(m["content"] for m in conversation["messages"] if m["content"])


def paragraphs(texts: dict[str, list[str]]) -> Counter:
    found = (p.strip() for documents in texts.values() for text in documents for p in re.split(r"\n\s*\n", text))
    return Counter(p for p in found if len(p) >= 40)


def runs(text: str) -> set[str]:
    flat = " ".join(text.split())
    return {flat[i : i + SHARED] for i in range(len(flat) - SHARED + 1)}


@pytest.mark.parametrize(
    ("texts", "least"),
    [
        (calibration, {"prose": 65_000, "code": 45_000, "languages": 45_000, "chat": 35_000}),
        (heldout, {"prose": 7_500, "code": 7_000, "languages": 10_000, "chat": 5_000}),
    ],
)
def test_every_kind_is_there_in_its_size(texts, least):
    sizes = {kind: sum(len(text.encode()) for text in documents) for kind, documents in texts().items()}
    assert all(sizes[kind] >= least[kind] for kind in least), sizes


def test_calibration_reads_exactly_these_documents():
    tokens = pytest.importorskip("moet.calibrate.tokens")
    read = tokens.default_texts()
    assert {kind: [d.text for d in read[kind]] for kind in KINDS} == {kind: calibration()[kind] for kind in KINDS}
    assert [list(d.messages) for d in read["chat"]] == [c["messages"] for c in conversations(TEXT / "chat.jsonl")]
    assert sum(bool(d.tools) for d in read["chat"]) >= 5


def test_nothing_is_there_twice():
    assert not [p for p, n in (paragraphs(calibration()) + paragraphs(heldout())).items() if n > 1]


def test_calibration_and_heldout_share_nothing():
    seen = set().union(*(runs(text) for documents in calibration().values() for text in documents))
    assert len(seen) > 150_000
    for kind, documents in heldout().items():
        for text in documents:
            assert not runs(text) & seen, f"{kind}: {next(iter(runs(text) & seen))!r}"


def test_text_is_clean():
    for texts in (calibration(), heldout()):
        for kind, documents in texts.items():
            for text in documents:
                assert len(text) > 60 and "\ufffd" not in text and "\r" not in text and "=====8<" not in text, f"{kind}: {text[:60]!r}"


def test_languages_are_of_many_scripts():
    scripts = {"Han": "一-鿿", "Kana": "ぁ-ヿ", "Hangul": "가-힣", "Cyrillic": "а-я", "Arabic": "ء-ي", "Devanagari": "अ-ह", "Vietnamese": "ạ-ỹ"}
    scripts |= {"Greek": "α-ω", "Hebrew": "א-ת", "Thai": "ก-ฮ", "Bengali": "অ-হ"}
    text = "".join(calibration()["languages"])
    few = {name: n for name, chars in scripts.items() if (n := len(re.findall(f"[{chars}]", text))) < 100}
    assert not few


@pytest.mark.parametrize("path", [TEXT / "chat.jsonl", HELDOUT / "chat.jsonl"], ids=["calibration", "heldout"])
def test_conversations_are_well_formed(path):
    for number, conversation in enumerate(conversations(path), 1):
        where = f"{path.name}:{number}"
        messages = conversation["messages"]
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in conversation.get("tools", [])}
        roles = [m["role"] for m in messages]
        assert "system" not in roles[1:] and roles[-1] == "assistant" and "user" in roles[:2], where
        waiting: list[str] = []
        for message in messages:
            assert (message["role"] == "tool") == bool(waiting), f"{where}: a call without its answer, or an answer without a call"
            if message["role"] == "tool":
                waiting.remove(message["tool_call_id"])
            for call in message.get("tool_calls", []):
                waiting.append(call["id"])
                jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
            assert message["content"] or message.get("tool_calls"), where
        assert not waiting, where


def test_the_text_is_in_the_package():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["moet"]
    package = ROOT / "src" / "moet"
    shipped = {p for pattern in data for p in package.glob(pattern) if p.is_file()}
    assert {p for p in TEXT.rglob("*") if p.is_file()} <= shipped
