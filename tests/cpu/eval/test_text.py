"""Documents and windows: nothing lost, nothing counted twice, the same ones every time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.errors import EvalError
from moet.eval import text
from moet.eval.text import Document


@given(st.text(max_size=400), st.integers(16, 64))
def test_cut_loses_nothing(content, size):
    pieces = text.cut(content, size)
    assert "".join(pieces) == content
    assert all(len(p.encode()) <= size + 3 for p in pieces)  # the character that reaches the size may have four bytes
    assert all(pieces)


def test_cut_before_white_space():
    assert text.cut("aaaa bbbb cccc dddd", 12) == ["aaaa bbbb", " cccc dddd"]


def documents():
    return [Document(f"d{i}", "en" if i % 2 else "de", f"{i} " + "word " * (10 * i)) for i in range(12)]


def test_windows_take_the_domains_in_turn():
    found = text.windows(documents(), 100, 8, whole=True)
    assert [w.domain for w in found] == ["de", "en"] * 4
    assert found == text.windows(documents(), 100, 8, whole=True)
    assert found != text.windows(documents(), 100, 8, whole=True, seed=1)


def test_short_documents_are_whole_and_scraps_are_left_out():
    found = text.windows([Document("a", "x", "tiny"), Document("b", "x", "z" * 100 + " " + "y" * 10)], 100, 9, whole=True)
    assert sorted(w.text for w in found) == ["tiny", "z" * 100]


def test_long_windows_are_long():
    found = text.windows(documents(), 400, 99, whole=False)
    assert found and all(w.bytes >= 200 for w in found)


def test_where_no_document_is_long_they_are_joined():
    (window,) = text.windows([Document(f"d{i}", "x", "abc") for i in range(40)], 200, 9, whole=False)
    assert window.document == "x (joined)" and "abc\n\nabc" in window.text


def test_bytes_are_utf_8():
    assert text.Window("d", "x", "é🙂").bytes == 6


def test_read(tmp_path):
    (tmp_path / "plain.txt").write_text("one\ntwo")
    rows = [{"text": "a"}, {"text": "b", "language": "de"}, {"text": "c", "source": "s"}, {"messages": [{"role": "user", "content": "hi"}], "domain": "chat"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    specs = [str(tmp_path / "plain.txt"), str(tmp_path / "rows.jsonl"), f"named={tmp_path / 'rows.jsonl'}"]
    found = text.read(specs, lambda messages, tools: f"<{messages[0]['content']}{tools}>")
    assert [(d.domain, d.text) for d in found[:5]] == [("plain", "one\ntwo"), ("rows", "a"), ("de", "b"), ("s", "c"), ("chat", "<hiNone>")]
    assert {d.domain for d in found[5:]} == {"named"} and found[1].name == "rows.jsonl:1"


def test_a_chat_starts_once(subjects):
    """Templates that begin with the start token, which windows add."""
    tokenizer = subjects["source"].tokenizer

    class Starting:
        start = tokenizer.start
        decode = staticmethod(tokenizer.decode)

        @staticmethod
        def render(messages, tools):
            return "<|bos|>" + tokenizer.render(messages, tools)

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    found = text.rendering(Starting)(messages, None)
    assert found == text.rendering(tokenizer)(messages, None) and found.startswith("<|user|>hi")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.txt", None, "No such file"),
        ("latin.txt", b"\xe9t\xe9", "byte 0xe9 at 0"),
        ("bad.jsonl", b"{", "bad.jsonl:1: expected a JSON object"),
        ("list.jsonl", b"[1]", '"text" or "messages"'),
        ("empty.txt", b" \n", "expected text, found none"),
        ("chat.jsonl", b'{"messages": []}', "--tokenizer FOLDER"),
    ],
)
def test_read_refuses(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EvalError, match=message):
        text.read([str(tmp_path / name)])
