"""JSON lines that people write: each one is checked before anything is measured."""

import json
from pathlib import Path
from typing import Any

from moet.errors import EvalError


def read_text(path: Path, what: str) -> str:
    """A text file in UTF-8, with or without a byte order mark. what: the option, for the message. Raises EvalError."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as e:
        raise EvalError(f"{what}: expected a readable file, found: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise EvalError(f"{what}: expected UTF-8, found byte {e.object[e.start]:#x} at {e.start}") from None


def objects(name: str, text: str, wanted: str) -> list[tuple[str, dict[str, Any]]]:
    """("NAME:LINE", object) of every line that is not blank. wanted: its keys, for the message. Raises EvalError if one is no JSON object."""
    # Not splitlines: JSON may hold U+2028 and the like as they are.
    return [(where := f"{name}:{number}", _object(where, line, wanted)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _object(name: str, line: str, wanted: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no tokenizer takes it
    except (ValueError, RecursionError) as e:
        raise EvalError(f"{name}: expected a JSON object, found: {e}") from None
    if not isinstance(row, dict):
        raise EvalError(f"{name}: expected an object with {wanted}, found {line[:60]!r}")
    return row


def text_of(name: str, row: dict[str, Any], key: str, default: str = "") -> str:
    """Raises EvalError if what is there is no text."""
    value = row.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise EvalError(f'{name}, "{key}": expected text, found {str(value)[:60]}')
    return value


def conversation(name: str, row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(messages, tools); empty where there are none. Raises EvalError if they are not in OpenAI's form."""
    messages, tools = row.get("messages") or [], row.get("tools") or []
    if not _list(messages) or not all(isinstance(m.get("role"), str) and _content(m.get("content")) for m in messages):
        raise EvalError(f'{name}, "messages": expected objects with a "role" and "content", found {str(messages)[:60]}')
    if not _list(tools) or not all(isinstance(t.get("function"), dict) and isinstance(t["function"].get("name"), str) for t in tools):
        raise EvalError(f'{name}, "tools": expected objects with a "function" that has a "name", found {str(tools)[:60]}')
    return messages, tools


def _list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


def _content(value: Any) -> bool:
    return value is None or isinstance(value, str) or _list(value)
