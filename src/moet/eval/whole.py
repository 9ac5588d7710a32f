"""A checkpoint or pack in memory as one transformers model in float32: prefill, decoding with its KV cache, and greedy answers."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from moet.checkpoint import Checkpoint
from moet.errors import EvalError
from moet.eval.packed import PackView, card_of, decoder_of, fill, is_plain, open_view
from moet.eval.subject import Answer, Card, Prompt, Shape
from moet.eval.tokens import FolderTokenizer

CHUNKS = 3
"""Pieces of unequal length that the `other` shape prefills a window in, each on the KV cache of those before."""


class HeadRows:
    """Hidden states of a window; the head is applied to the slice that is asked for, or, as in decoding, to one token at a time."""

    def __init__(self, hidden: torch.Tensor, head: nn.Module, offset: int = 0, *, single: bool = False) -> None:
        self.hidden, self.head, self.offset, self.single = hidden, head, offset, single

    @torch.no_grad()
    def logits(self, first: int, end: int) -> torch.Tensor:
        hidden = self.hidden[first - self.offset : end - self.offset]
        if self.single:
            return torch.cat([self.head(row[None]) for row in hidden]).float()
        return self.head(hidden).float()


class Whole:
    """See `Subject`. The exact values of all weights, rounded to float32; activations in float32."""

    card: Card
    decodes = "text"

    def __init__(self, folder: Path, *, precision: str, device: str = "cpu") -> None:
        view = open_view(folder)
        self.folder: Path | None = folder
        self.card = card_of(folder, view, precision)
        self.tokenizer = FolderTokenizer(folder)
        self.device = torch.device(device)
        self._loaded = contextlib.ExitStack()
        self.model = _plain(folder, self.device) if is_plain(view) else self._load(view, precision)
        self._body, self._head = self.model.get_decoder(), self.model.get_output_embeddings()
        self._stops = _stops(folder, self.tokenizer)

    def _load(self, view: Checkpoint | PackView, precision: str) -> nn.Module:
        """All layers at once, by the loader that otherwise has one at a time."""
        decoder = decoder_of(view, str(self.device))
        del decoder.model.get_decoder().layers[decoder.layers :]  # an MTP layer, which the decoder runs as one layer more
        self._loaded.enter_context(decoder.head())
        self._loaded.enter_context(decoder._loader.filled([decoder._name_of(decoder._embedding)], self.device))
        for index in range(decoder.layers):
            module = self._loaded.enter_context(decoder.layer(index))
            module.__dict__.pop("forward")  # the stub that runs layers one by one
            fill(decoder, module, view, index, precision)
        return decoder.model

    @torch.no_grad()
    def prefill(self, windows: Iterable[list[int]], shape: Shape = "plain") -> Iterator[HeadRows]:
        for ids in windows:
            tokens = torch.tensor([ids], device=self.device)
            if shape == "plain":
                yield HeadRows(self._body(tokens, use_cache=False).last_hidden_state[0], self._head)
            else:
                yield HeadRows(torch.cat(self._steps(tokens.split(_sizes(len(ids)), 1))), self._head)

    def decode(self, ids: list[int], context: int) -> tuple[list[int], HeadRows]:
        tokens = torch.tensor([ids[:-1]], device=self.device)
        hidden = self._steps(tokens.split([context] + [1] * (len(ids) - 1 - context), 1))
        return ids, HeadRows(torch.cat([hidden[0][-1:], *hidden[1:]]), self._head, context - 1, single=True)

    @torch.no_grad()
    def _steps(self, parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Hidden states [t, hidden] of each part, on the KV cache of those before."""
        cache, found = None, []
        for part in parts:
            out = self._body(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.last_hidden_state[0])
        return found

    @torch.no_grad()
    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        if prompt.messages:
            ids = self.tokenizer.encode(self.tokenizer.render(list(prompt.messages), list(prompt.tools)))
        else:
            ids = self.tokenizer.start + self.tokenizer.encode(prompt.text)
        part, cache, made = torch.tensor([ids], device=self.device), None, []
        stopped = False
        while len(made) < max_tokens and not stopped:
            out = self._body(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = int(self._head(out.last_hidden_state[0, -1:]).argmax())
            stopped = token in self._stops
            if not stopped:
                made.append(token)
            part = torch.tensor([[token]], device=self.device)
        return Answer(tuple(made), self.tokenizer.own.decode(made, skip_special_tokens=True), stopped)

    def close(self) -> None:
        self._loaded.close()


def _plain(folder: Path, device: torch.device) -> nn.Module:
    """A float32 or float16 checkpoint, as transformers itself loads it."""
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # it warns of MTP layers, which it does not have
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as e:
        raise EvalError(f"{folder}: expected a checkpoint that transformers loads, found: {str(e)[:300]}") from None
    finally:
        transformers.utils.logging.set_verbosity(before)
    return model.to(device).eval()


def _sizes(tokens: int) -> list[int]:
    """Unequal lengths of at most CHUNKS pieces, none of them the whole."""
    first = max(1, tokens // 7)
    second = max(1, tokens // 3)
    return [n for n in (first, second, tokens - first - second) if n > 0] if tokens > CHUNKS else [1] * tokens


def _stops(folder: Path, tokenizer: FolderTokenizer) -> set[int]:
    """Tokens that end an answer: generation_config.json's, else the tokenizer's."""
    from transformers import GenerationConfig

    stop = GenerationConfig.from_pretrained(folder).eos_token_id if (folder / "generation_config.json").is_file() else None
    stop = tokenizer.own.eos_token_id if stop is None else stop
    return set(stop) if isinstance(stop, list) else {stop}
