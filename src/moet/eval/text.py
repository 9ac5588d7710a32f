"""The text that is measured: documents of named domains, cut into short and long windows."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.errors import EvalError
from moet.eval.subject import Tokenizer

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
"""(messages, tools) -> the text that the model sees: the chat template."""

LEAST = 0.5
"""A window holds at least this share of the size that was asked for; `short` windows take shorter documents whole."""


@dataclass(frozen=True)
class Document:
    """One text. domain: the group that it is reported under (a language, a kind of text). name: FILE:LINE, or the file."""

    name: str
    domain: str
    text: str


@dataclass(frozen=True)
class Window:
    """A piece of a document that is scored on its own, after the tokenizer's start token. document: whose piece it is, the unit of resampling."""

    document: str
    domain: str
    text: str

    @property
    def bytes(self) -> int:
        return len(self.text.encode())


def read(specs: Sequence[str], render: Render | None = None) -> list[Document]:
    """Documents of `FILE` or `DOMAIN=FILE`.

    A .jsonl file has a document a line: `text`, or `messages` (and `tools`) that go through the chat template; its domain is the spec's, or the line's `domain`,
    `language` or `source`, or the file's name. Any other file is one document of plain UTF-8 text. Raises EvalError: no such file, not UTF-8, a line that is none of
    these, or nothing in it.
    """
    documents = []
    for spec in specs:
        domain, _, file = spec.rpartition("=") if not Path(spec).exists() else ("", "", spec)
        path = Path(file)
        try:
            content = path.read_text()
        except OSError as e:
            raise EvalError(f"--text {spec}: expected a readable file, or DOMAIN=FILE, found: {e.strerror}") from None
        except UnicodeDecodeError as e:
            raise EvalError(f"--text {spec}: expected UTF-8, found byte {e.object[e.start]:#x} at {e.start}") from None
        if path.suffix != ".jsonl":
            documents.append(Document(path.name, domain or path.stem, content))
            continue
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                documents.append(_row(f"{path.name}:{number}", domain, path.stem, line, render))
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise EvalError(f"--text {' '.join(specs)}: expected text, found none")
    return documents


def rendering(tokenizer: Tokenizer) -> Render:
    """The chat template without the start token's text, which every window gets by itself."""
    start = tokenizer.decode(tokenizer.start) if tokenizer.start else ""
    return lambda messages, tools: tokenizer.render(messages, tools).removeprefix(start)


def _row(name: str, domain: str, stem: str, line: str, render: Render | None) -> Document:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise EvalError(f"{name}: expected a JSON object, found: {e}") from None
    if not isinstance(row, dict) or not ("text" in row or "messages" in row):
        raise EvalError(f'{name}: expected an object with "text" or "messages", found {line[:60]!r}')
    domain = domain or row.get("domain") or row.get("language") or row.get("source") or stem
    if "text" in row:
        return Document(name, domain, row["text"])
    if render is None:
        raise EvalError(f"{name}: expected plain text, because no chat template is at hand, found messages; name a --tokenizer FOLDER")
    return Document(name, domain, render(row["messages"], row.get("tools")))


def cut(text: str, size: int) -> list[str]:
    """Consecutive pieces of about `size` UTF-8 bytes, cut before white space where there is some in the last quarter; joined, they are the text again."""
    pieces, start = [], 0
    while start < len(text):
        end, used = start, 0
        while end < len(text) and used < size:
            used += len(text[end].encode())
            end += 1
        if end < len(text):
            space = max(text.rfind(c, start + (end - start) * 3 // 4, end) for c in " \n")
            end = space if space > start else end
        pieces.append(text[start:end])
        start = end
    return pieces


def windows(documents: Sequence[Document], size: int, count: int, *, whole: bool, seed: int = 0) -> list[Window]:
    """At most `count` windows of about `size` bytes, the domains in turn, in a seeded random order within each.

    whole: also take documents that are shorter than LEAST * size, as they are (what short windows do); otherwise only pieces of at least that many bytes, and where a
    domain has no document that long, its documents joined by empty lines.
    """
    by_domain: dict[str, list[Window]] = {}
    for domain in dict.fromkeys(d.domain for d in documents):
        own = [d for d in documents if d.domain == domain]
        found = _windows(own, size, whole)
        if not found and not whole:
            joined = Document(f"{domain} (joined)", domain, "\n\n".join(d.text for d in own))
            found = _windows([joined], size, whole)
        random.Random(f"{seed} {domain}").shuffle(found)
        by_domain[domain] = found
    picked: list[Window] = []
    while len(picked) < count and any(by_domain.values()):
        for found in by_domain.values():
            if found and len(picked) < count:
                picked.append(found.pop())
    return picked


def _windows(documents: Sequence[Document], size: int, whole: bool) -> list[Window]:
    found = []
    for d in documents:
        pieces = cut(d.text, size)
        least = LEAST * size
        for piece in pieces:
            if piece.strip() and (len(piece.encode()) >= least or (whole and len(pieces) == 1)):
                found.append(Window(d.name, d.domain, piece))
    return found
