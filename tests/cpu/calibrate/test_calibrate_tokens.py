"""From text to windows of tokens."""

import itertools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moet.calibrate.tokens import Document, default_texts, read_file, windows
from moet.errors import ConfigError

DEMO = Path(__file__).parents[3] / "demo" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def words(n: int, start: int = 0) -> str:
    return " ".join(f"word {i}" for i in range(start, start + n))


def test_windows_are_pieces_of_the_documents_in_order(tokenizer):
    documents = [Document(words(300)), Document(words(400, 1000))]
    found = windows(DEMO, {"a": documents}, tokens=10**6, positions=64)
    flat = []
    for document in documents:
        flat += [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
    assert found.ids.dtype == torch.int64 and found.ids.shape == (len(flat) // 64, 64)
    assert found.ids.flatten().tolist() == flat[: found.ids.numel()]
    assert found.kinds == {"a": len(found.ids)}


def test_kinds_share_the_tokens_and_windows_are_spread():
    texts = {
        "long": [Document(words(3000))],
        "short": [Document(words(40))],
        "other": [Document(words(2000))],
    }
    everything = windows(DEMO, texts, tokens=10**9, positions=64)
    found = windows(DEMO, texts, tokens=32 * 64, positions=64)
    short = everything.kinds["short"]
    assert short < 32 // 3 < everything.kinds["other"]
    assert found.kinds["short"] == short and sum(found.kinds.values()) == 32
    assert abs(found.kinds["long"] - found.kinds["other"]) <= 1
    whole = everything.ids[: everything.kinds["long"]].tolist()
    places = [whole.index(w) for w in found.ids[: found.kinds["long"]].tolist()]
    gaps = {b - a for a, b in itertools.pairwise(places)}
    assert places[0] == 0 and max(gaps) - min(gaps) <= 1


def test_digest_is_of_the_tokens():
    def digest(text: str, tokens: int = 1 << 20) -> str:
        return windows(DEMO, {"a": [Document(text)]}, tokens, 32).digest

    assert digest(words(200)) == digest(words(200))
    assert len({digest(words(200)), digest(words(200, 1)), digest(words(200), 64)}) == 3


def test_conversations_go_through_the_chat_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}}]
    messages = [{"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": "Four."}]
    document = Document(messages=tuple(messages * 20), tools=tuple(tools))
    found = windows(DEMO, {"chat": [document]}, 1 << 20, 32)
    text = tokenizer.decode(found.ids.flatten())
    template = tokenizer.apply_chat_template(messages * 20, tools=tools, tokenize=False)
    assert text[:200] == template[:200] and template.startswith("<s>")


def test_a_conversation_that_the_template_refuses_keeps_its_words(tokenizer):
    document = Document(messages=({"role": "narrator", "content": words(100)},) * 2)
    found = windows(DEMO, {"chat": [document]}, 1 << 20, 32)
    assert "word 17" in tokenizer.decode(found.ids.flatten())


def test_the_default_text_is_enough_and_of_every_kind():
    found = windows(DEMO, default_texts(), 32768, 1024)
    assert found.ids.shape == (32, 1024)
    assert set(found.kinds) == {"prose", "code", "languages", "chat"} and min(found.kinds.values()) >= 4


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"messages": []}', '{"messages": [{"content": "x"}]}', '{"text": 3}', "3"]
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match="x.jsonl, line 3: expected"):
        read_file(path)


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "one"}\n{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}\n'
    )
    assert read_file(tmp_path / "a.txt") == [Document("some text\n")]
    assert read_file(tmp_path / "b.jsonl") == [
        Document("one"),
        Document(messages=({"role": "user", "content": "x"},), tools=({},)),
    ]
    with pytest.raises(ConfigError, match="none.txt: expected a readable text file"):
        read_file(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="expected text of at least 1024 tokens"):
        windows(DEMO, {"a": [Document("short")]}, 4096, 2048)
