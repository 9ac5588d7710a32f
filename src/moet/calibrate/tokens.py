"""From text to the token windows that calibration runs on."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from moet.errors import CheckpointError, ConfigError

WINDOW = 1024
"""Tokens of a window; fewer if the model's positions end before."""
TEXT = Path(__file__).parent / "text"


@dataclass(frozen=True)
class Windows:
    """ids: int64 [windows, length], all full. kinds: how many windows of each kind of text."""

    ids: torch.Tensor
    kinds: dict[str, int]

    @property
    def digest(self) -> str:
        """blake3 of the shape and of all ids as little-endian int64."""
        shape = torch.tensor(self.ids.shape, dtype=torch.int64)
        return blake3(shape.numpy().tobytes() + self.ids.numpy().astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Document:
    """A text, or a conversation: messages, and the tools that it may call."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def default_texts() -> dict[str, list[Document]]:
    """The texts that come with moet, by kind: prose, code, languages, chat."""
    kinds = {
        kind: [Document(p.read_text("utf-8")) for p in sorted((TEXT / kind).rglob("*")) if p.is_file()]
        for kind in ("prose", "code", "languages")
    }
    return kinds | {"chat": read_file(TEXT / "chat.jsonl")}


def read_file(path: Path) -> list[Document]:
    """A .jsonl file: each line an object with "text", or with "messages" and perhaps "tools". Any other file: one text.
    Raises ConfigError: not readable, not UTF-8, or a line that is neither."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: expected a readable text file in UTF-8, found: {e}") from None
    if path.suffix != ".jsonl":
        return [Document(text)]
    # Not splitlines: JSON may hold U+2028 and the like as they are.
    return [_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _line(path: Path, number: int, line: str) -> Document:
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no tokenizer takes it
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}, line {number}: expected a JSON object, found: {e}") from None
    if isinstance(found, dict):
        text, messages, tools = found.get("text"), found.get("messages"), found.get("tools") or []
        if isinstance(text, str):
            return Document(text)
        if messages and _objects(messages) and all(map(_is_message, messages)) and _objects(tools):
            return Document(messages=tuple(messages), tools=tuple(tools))
    raise ConfigError(
        f'{path}, line {number}: expected an object with "text", or with "messages" (objects with a "role" and "content") '
        f'and perhaps "tools" (objects), found {line[:80]!r}'
    )


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


def _is_message(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(message.get("role"), str) and (content is None or isinstance(content, str) or _objects(content))


def windows(root: Path, texts: dict[str, list[Document]], tokens: int, positions: int) -> Windows:
    """About `tokens` tokens, in equal parts from every kind that has enough, spread evenly over its documents.

    root: the checkpoint, for its tokenizer and chat template. positions: the most that the model can count.
    Raises CheckpointError if the tokenizer cannot be read, ConfigError if a kind does not fill a window.
    """
    tokenizer = _tokenizer(root)
    length = min(WINDOW, positions)
    cut = {kind: _cut(tokenizer, documents, length) for kind, documents in texts.items()}
    if short := [kind for kind, found in cut.items() if not found]:
        raise ConfigError(
            f"calibration: expected text of at least {length} tokens in {', '.join(short)}, found less; leave it out, or "
            "give more with --calibration"
        )
    wanted = _shares({kind: len(found) for kind, found in cut.items()}, max(1, tokens // length))
    chosen = [
        found[i * len(found) // wanted[kind]] for kind, found in cut.items() for i in range(wanted[kind])
    ]
    return Windows(torch.stack(chosen), {kind: n for kind, n in wanted.items() if n})


def _shares(there: dict[str, int], count: int) -> dict[str, int]:
    """Windows of each kind: equal, but no more than there are; what a kind lacks goes to the others."""
    wanted, left = dict.fromkeys(there, 0), min(count, sum(there.values()))
    while left:
        for kind in sorted(there, key=lambda k: wanted[k]):
            if wanted[kind] < there[kind] and left:
                wanted[kind] += 1
                left -= 1
    return wanted


def _cut(tokenizer: Any, documents: Sequence[Document], length: int) -> list[torch.Tensor]:
    """Documents one after the other, each as the tokenizer begins it and with the end token, in windows; the rest at the end is left out."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in documents:
        found = _ids(tokenizer, document)
        ids += found + end * (found[-1:] != end)
    return list(torch.tensor(ids[: len(ids) // length * length], dtype=torch.int64).reshape(-1, length))


def _ids(tokenizer: Any, document: Document) -> list[int]:
    """A conversation goes through the model's chat template, which says how it begins, too; or line by line where there is
    none that takes it."""
    if document.messages and tokenizer.chat_template:
        # A template is the model's own program and may raise anything; the words matter more than the frame.
        with contextlib.suppress(Exception):
            tools = list(document.tools) or None
            text = tokenizer.apply_chat_template(list(document.messages), tools=tools, tokenize=False)
            return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    lines = [json.dumps(tool, ensure_ascii=False) for tool in document.tools]
    for message in document.messages:
        calls, text = message.get("tool_calls"), message.get("content") or ""
        if not isinstance(text, str):
            text = "\n".join(str(part.get("text", "")) for part in text)
        lines.append(f"{message['role']}: {text}" + (json.dumps(calls, ensure_ascii=False) if calls else ""))
    return tokenizer("\n".join(lines) or document.text, verbose=False)["input_ids"]


def _tokenizer(root: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(root)
    except Exception as e:  # noqa: BLE001 - what a damaged file causes in transformers and tokenizers comes through
        raise CheckpointError(
            f"{root}: expected a tokenizer that transformers reads, found: {next(iter(str(e).splitlines()), type(e).__name__)}; "
            "`--no-calibrate` needs none"
        ) from None
