"""The text that is measured: documents of named domains, cut into short and long windows."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.errors import EvalError
from moet.eval import lines
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
        content = lines.read_text(path, f"--text {spec}")
        if path.suffix != ".jsonl":
            documents.append(Document(path.name, domain or path.stem, content))
            continue
        documents += [_row(name, domain, path.stem, row, render) for name, row in lines.objects(path.name, content, '"text" or "messages"')]
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise EvalError(f"--text {' '.join(specs)}: expected text, found none")
    return documents


def rendering(tokenizer: Tokenizer) -> Render:
    """The chat template without the start token's text, which every window gets by itself."""
    start = tokenizer.decode(tokenizer.start) if tokenizer.start else ""
    return lambda messages, tools: tokenizer.render(messages, tools).removeprefix(start)


def _row(name: str, domain: str, stem: str, row: dict[str, Any], render: Render | None) -> Document:
    domains = [lines.text_of(name, row, key) for key in ("domain", "language", "source")]
    domain = next(filter(None, [domain, *domains]), stem)
    if text := lines.text_of(name, row, "text"):
        return Document(name, domain, text)
    if "messages" in row and render is None:
        raise EvalError(f"{name}: expected plain text, because no chat template is at hand, found messages; name a --tokenizer FOLDER")
    messages, tools = lines.conversation(name, row)
    if "text" in row and not messages:
        return Document(name, domain, "")
    if render is None or not messages:
        raise EvalError(f'{name}: expected an object with "text" or "messages", found {str(row)[:60]}')
    return Document(name, domain, render(messages, tools or None))


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
