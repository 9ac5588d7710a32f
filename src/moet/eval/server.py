"""An OpenAI-compatible server. Full-vocabulary log-probabilities need vLLM's `prompt_logprobs`, and `--max-logprobs -1` where it was started."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import torch

from moet.errors import EvalError
from moet.eval.subject import Answer, Card, Prompt, Shape
from moet.eval.tokens import FolderTokenizer
from moet.eval.toplist import ListedRows, Top
from moet.pack import Pack
from moet.pack.manifest import NAME

SECONDS = 1800.0
QUICK_SECONDS = 60.0
"""For what needs no model: names, version, counters."""
MOST_TOKENS = 1 << 24
"""No vocabulary is larger; a token id beyond is no token."""
TOGETHER = 4
"""Requests in flight at a time in the `other` shape, so that the server batches them."""
EXCLUDED = -9999.0
"""What vLLM prints for a log-probability of minus infinity."""
MASS = 1e-3
"""How far from 1 the probabilities of a whole vocabulary may add up, in float32."""
DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class ArrayRows:
    """Log-probabilities that are here already, float32 [t, vocab], of what follows tokens `offset` and on."""

    def __init__(self, values: torch.Tensor, offset: int = 0) -> None:
        self.values, self.offset = values, offset

    def logits(self, first: int, end: int) -> torch.Tensor:
        return self.values[first - self.offset : end - self.offset]


class Server:
    """See `Subject`. The decode path goes along the server's own text, drawn at temperature 1 with a seed."""

    decodes = "own"

    def __init__(self, url: str, *, tokenizer: str = "", model: str = "", top: int = 0, seed: int = 0, key: str = "") -> None:
        """top: ask for so many tokens of each distribution; 0: all. key: what the server wants as a bearer token."""
        self.url, self.seed, self.top = url.rstrip("/").removesuffix("/v1"), seed, top
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self.http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(SECONDS, connect=10), headers=headers)
        except (httpx.InvalidURL, UnicodeError) as e:
            raise EvalError(f"{url}: expected http://HOST:PORT of a server, found: {e}") from None
        with self._understood("/v1/models"):
            models = self._get("/v1/models").json().get("data") or []
            found = [m for m in models if model in ("", m.get("id"))]
            if not found:
                raise EvalError(f"{url}: expected a model {model or 'in /v1/models'}, found {', '.join(m.get('id', '?') for m in models) or 'none'}")
            self.model: str = found[0]["id"]
            root = Path(found[0].get("root") or "/nonexistent")
            self.folder: Path | None = root if (root / "config.json").is_file() else None
            self.card = self._card(found[0])
        self.tokenizer = FolderTokenizer(tokenizer or self.folder) if tokenizer or self.folder else ServerTokenizer(self)

    def _card(self, model: dict[str, Any]) -> Card:
        moet = model.get("moet") or {}
        mode = f"{moet['precision']}, {moet.get('activations')} activations" if "precision" in moet else "as served"
        details = {"model": self.model, "max_model_len": model.get("max_model_len"), "owned_by": model.get("owned_by"), "moet": moet or None}
        version = self._optional("/version")
        if version is not None:
            details["engine"] = version.json().get("version")
        print_ = moet.get("fingerprint") or (Pack.open(self.folder).fingerprint if self.folder and (self.folder / NAME).is_file() else "")
        return Card("server", self.url, mode, print_, {k: v for k, v in details.items() if v is not None})

    def prefill(self, windows: Iterable[list[int]], shape: Shape = "plain") -> Iterator[ArrayRows | ListedRows]:
        if shape == "plain":
            yield from map(self._prompt, windows)
            return
        waiting = iter(windows)
        with ThreadPoolExecutor(TOGETHER) as pool:
            while batch := list(islice(waiting, TOGETHER)):
                yield from pool.map(self._prompt, batch)

    def _prompt(self, ids: list[int]) -> ArrayRows | ListedRows:
        """One request with the log-probabilities at every token but the first."""
        choice = self._complete({"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.top or -1})
        if choice.prompt_logprobs is None or len(choice.prompt_logprobs) != len(ids):
            raise EvalError(f"{self.url}: expected prompt_logprobs of {len(ids)} tokens, as vLLM gives them, found {len(choice.prompt_logprobs or ())}")
        return self._rows([{t: x.logprob for t, x in (row or {}).items()} for row in choice.prompt_logprobs[1:]], 0)

    def decode(self, ids: list[int], context: int) -> tuple[list[int], ArrayRows | ListedRows]:
        wanted = len(ids) - context
        body = {"prompt": ids[:context], "max_tokens": wanted, "temperature": 1, "seed": self.seed, "ignore_eos": True, "logprobs": self.top or -1}
        choice = self._complete({**body, "return_token_ids": True, "return_tokens_as_token_ids": True})
        rows = (choice.logprobs.top_logprobs if choice.logprobs else None) or []
        if choice.token_ids is None or len(rows) != len(choice.token_ids):
            raise EvalError(f"{self.url}: expected token_ids and logprobs of each generated token, as vLLM gives them, found {len(rows)} rows")
        with self._understood("/v1/completions"):
            named = [{int(t.removeprefix("token_id:")): x for t, x in (row or {}).items()} for row in rows]
        return ids[:context] + choice.token_ids, self._rows(named, context - 1)

    def _rows(self, rows: list[dict[int, float]], offset: int) -> ArrayRows | ListedRows:
        wrong = [t for row in rows for t in (min(row, default=0), max(row, default=0)) if not 0 <= t < MOST_TOKENS]
        if wrong:
            raise EvalError(f"{self.url}: expected log-probabilities of tokens from 0 to {MOST_TOKENS - 1}, found one of token {wrong[0]}")
        return ListedRows(Top.of(rows), offset) if self.top else ArrayRows(self._whole(rows), offset)

    def _whole(self, rows: list[dict[int, float]]) -> torch.Tensor:
        """float32 [t, vocab]. Raises EvalError unless every row is a whole vocabulary."""
        vocab = 1 + max((max(row, default=0) for row in rows), default=0)
        values = np.full((len(rows), vocab), -np.inf, np.float32)
        for row, out in zip(rows, values, strict=True):
            out[np.fromiter(row.keys(), np.int64, len(row))] = np.fromiter(row.values(), np.float32, len(row))
        values[values <= EXCLUDED] = -np.inf
        mass = np.exp(values.astype(np.float64)).sum(1)
        if len(rows) and np.abs(mass - 1).max() > MASS:
            raise EvalError(
                f"{self.url}: expected log-probabilities of the whole vocabulary, found {min(map(len, rows))} tokens with a probability of {mass.min():.4f} together; "
                "start vLLM with --max-logprobs -1, or compare --top K of them"
            )
        return torch.from_numpy(values)

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        before = self._drafts()
        with self._understood("/v1/chat/completions" if prompt.messages else "/v1/completions"):
            ids, text, stopped, found = self._answer(prompt, max_tokens)
        after = self._drafts()
        drafts = tuple(b - a for a, b in zip(before, after, strict=True)) if before and after else None
        return Answer(tuple(ids), text, stopped, found, drafts)

    def _answer(self, prompt: Prompt, max_tokens: int) -> tuple[list[int], str, bool, tuple[tuple[str, str], ...] | None]:
        if prompt.messages:
            body: dict[str, Any] = {"messages": list(prompt.messages), "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
            if prompt.tools:
                body |= {"tools": list(prompt.tools), "tool_choice": "auto"}
            choice = self._post("/v1/chat/completions", body).json()["choices"][0]
            message = choice["message"]
            text, calls = message.get("content") or "", message.get("tool_calls") or []
            found = tuple((c["function"]["name"], c["function"]["arguments"]) for c in calls) if prompt.tools else None
        else:
            ids = self.tokenizer.start + self.tokenizer.encode(prompt.text)
            choice = self._post("/v1/completions", {"prompt": ids, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}).json()["choices"][0]
            text, found = choice["text"], None
        ids, stopped = choice.get("token_ids"), choice.get("finish_reason") != "length"
        if ids is None:  # not vLLM: the text's tokens are close to it
            ids = self.tokenizer.encode(text)
        elif stopped and not isinstance(choice.get("stop_reason"), str):
            ids = ids[:-1]  # vLLM gives the stop token too
        if not isinstance(text, str) or not all(isinstance(i, int) for i in ids):
            raise TypeError("a text or token_ids of another kind")
        return ids, text, stopped, found

    def _drafts(self) -> tuple[float, ...] | None:
        """vLLM's counters of speculative decoding, None where there are none."""
        response = self._optional("/metrics")
        if response is None:
            return None
        values = [re.findall(rf"^vllm:spec_decode_{name}_total\{{.*\}} (\S+)$", response.text, re.MULTILINE) for name in DRAFTS]
        with self._understood("/metrics"):
            return tuple(sum(map(float, v)) for v in values) if all(values) else None

    def close(self) -> None:
        self.http.close()

    def _complete(self, body: dict[str, Any]) -> _Choice:
        response = self._post("/v1/completions", body)
        try:
            return msgspec.json.decode(response.content, type=_Completion).choices[0]
        except (msgspec.DecodeError, IndexError) as e:
            raise EvalError(f"{self.url}/v1/completions: expected an OpenAI completion, found: {e}") from None

    @contextlib.contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """What an answer lacks is the server's fault."""
        try:
            yield
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            raise EvalError(f"{self.url}{path}: expected an answer in OpenAI's form, as vLLM gives it, found: {type(e).__name__}: {e}") from None

    def _optional(self, path: str) -> httpx.Response | None:
        """None where a server has no such page; other servers than vLLM have not."""
        try:
            return self._get(path)
        except EvalError:
            return None

    def _get(self, path: str) -> httpx.Response:
        return self._checked(path, "GET", timeout=QUICK_SECONDS)

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._checked(path, "POST", json={"model": self.model, **body})

    def _checked(self, path: str, method: str, **more: Any) -> httpx.Response:
        try:
            response = self.http.request(method, path, **more)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as e:
            raise EvalError(f"{self.url}{path}: expected an answer, found: {type(e).__name__}: {e}") from None
        if not response.is_success:
            hint = "; start vLLM with --max-logprobs -1, or compare --top K of them" if "logprobs" in response.text else ""
            raise EvalError(f"{self.url}{path}: expected success, found {response.status_code}: {response.text[:300]}{hint}")
        return response


class ServerTokenizer:
    """vLLM's /tokenize and /detokenize, for a server whose files are elsewhere. start: what it puts before a text, maybe nothing."""

    def __init__(self, server: Server) -> None:
        self.server = server
        probe = "a"
        whole, plain = self._encode(probe, True), self._encode(probe, False)
        self.start = whole[: len(whole) - len(plain)] if whole[len(whole) - len(plain) :] == plain else []

    def _encode(self, text: str, special: bool) -> list[int]:
        with self.server._understood("/tokenize"):
            return self.server._post("/tokenize", {"prompt": text, "add_special_tokens": special}).json()["tokens"]

    def encode(self, text: str) -> list[int]:
        return self._encode(text, False)

    def decode(self, ids: list[int]) -> str:
        with self.server._understood("/detokenize"):
            return self.server._post("/detokenize", {"tokens": ids}).json()["prompt"]

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        body = {"messages": messages, "tools": tools or None, "add_generation_prompt": messages[-1]["role"] != "assistant"}
        with self.server._understood("/tokenize"):
            return self.decode(self.server._post("/tokenize", body).json()["tokens"])
