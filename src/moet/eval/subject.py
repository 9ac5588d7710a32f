"""What can be measured, and the few things that measuring asks of it. `open` finds out which kind a name is."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from moet.errors import EvalError
from moet.eval.toplist import ListedRows

Shape = Literal["plain", "other"]
"""plain: one window at a time, in one piece. other: the same windows in another batch shape, which only rounding can notice."""


@dataclass(frozen=True)
class Card:
    """What a result file says of a subject. mode: precision and activation format. fingerprint: of the source checkpoint's content ("" if a server does not say)."""

    kind: Literal["checkpoint", "pack", "server"]
    name: str
    mode: str
    fingerprint: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Prompt:
    """One request: `messages` (with `tools`) for the chat template, or plain `text`. schema: what the answer, as JSON, has to validate against."""

    name: str
    domain: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """A greedy answer. ids: its tokens, without the stop token; stopped: it ended by itself. calls: (name, arguments as text) of tool calls that the server found;
    None: nobody looked. drafts: speculative steps, drafted and accepted tokens, None if the subject does not say."""

    ids: tuple[int, ...]
    text: str
    stopped: bool
    calls: tuple[tuple[str, str], ...] | None = None
    drafts: tuple[float, float, float] | None = None


class Tokenizer(Protocol):
    """start: what every window begins with (at most the model's own start tokens, maybe none)."""

    start: list[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str: ...


class Rows(Protocol):
    """A window under one model: `logits(a, b)` is float32 [b - a, vocab], the (log-)probabilities of what follows tokens a to b - 1. Good until the next window is asked
    for. A server that lists its most probable tokens only gives `toplist.ListedRows` instead."""

    def logits(self, first: int, end: int) -> torch.Tensor: ...


class Subject(Protocol):
    """decodes: "text" (it can be forced along a text, token by token), "own" (it can only be asked for its own text), "" (no decode path).
    folder: where its files are, if they are on this machine."""

    card: Card
    tokenizer: Tokenizer
    decodes: Literal["text", "own", ""]
    folder: Path | None

    def prefill(self, windows: Iterable[list[int]], shape: Shape = "plain") -> Iterator[Rows | ListedRows]: ...

    def decode(self, ids: list[int], context: int) -> tuple[list[int], Rows | ListedRows]:
        """The decode path: the tokens it went along (`ids`, or the first `context` of them and a continuation of its own), and its logits of those after `context`."""
        ...

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer: ...

    def close(self) -> None: ...


def open_subject(name: str, *, precision: str, tokenizer: str = "", device: str = "cpu", stream: bool = False, model: str = "", top: int = 0, seed: int = 0, key: str = "") -> Subject:
    """The subject behind a URL, a checkpoint folder or a pack folder.

    precision: of a pack's rows. tokenizer: a folder, for a server whose own is not at hand. stream: one layer at a time, for models that do not fit in memory. model: the
    served name, where a server has several. top: of a server's distributions, so many tokens; 0: all. seed: of a server's own text. key: its API
    key. Raises EvalError if it is none of these; and what opening raises.
    """
    if name.startswith(("http://", "https://")):
        from moet.eval.server import Server

        return Server(name, tokenizer=tokenizer, model=model, top=top, seed=seed, key=key)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise EvalError(f"{name}: expected http://HOST:PORT of a server, a checkpoint folder or a pack, found {'no config.json in it' if folder.is_dir() else 'none'}")
    _check_device(device)
    if stream:
        from moet.eval.streamed import Streamed

        return Streamed(folder, precision=precision, device=device)
    from moet.eval.whole import Whole

    return Whole(folder, precision=precision, device=device)


def _check_device(name: str) -> None:
    try:
        known = torch.device(name).type in ("cpu", "cuda")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # the latter where torch was built without CUDA
        known = False
    if not known:
        raise EvalError(f"--device: expected cpu, or cuda where torch finds a GPU, found {name or 'nothing'}")
