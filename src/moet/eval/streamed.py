"""A checkpoint or pack that does not fit in memory: all windows go through one layer at a time. Prefill only."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from moet.errors import EvalError
from moet.eval.packed import card_of, decoder_of, fill, is_plain, open_view
from moet.eval.subject import Answer, Prompt, Shape
from moet.eval.tokens import FolderTokenizer
from moet.forward import Decoder, States


class StateRows:
    """States after the last layer; the head is applied to the slice that is asked for, while `prefill` holds it."""

    def __init__(self, decoder: Decoder, states: States) -> None:
        self.decoder, self.states = decoder, states

    def logits(self, first: int, end: int) -> torch.Tensor:
        part = States(self.states.ids[:, first:end], self.states.hidden[:, first:end])
        return self.decoder.head_of(part)[0]


class Streamed:
    """See `Subject`. Holds one layer's weights in float32, and the hidden states of all windows."""

    decodes = ""

    def __init__(self, folder: Path, *, precision: str, device: str = "cpu") -> None:
        self.view, self.precision = open_view(folder), precision
        if is_plain(self.view):
            raise EvalError(f"{folder}: expected experts in a format that can be packed for --stream, found float32 or float16; leave --stream out")
        self.folder: Path | None = folder
        self.card = card_of(folder, self.view, precision)
        self.tokenizer = FolderTokenizer(folder)
        self.decoder = decoder_of(self.view, device)

    def prefill(self, windows: Iterable[list[int]], shape: Shape = "plain") -> Iterator[StateRows]:
        """The `other` shape: each window twice in one batch."""
        times = 1 if shape == "plain" else 2
        states = [self.decoder.embed(torch.tensor([ids] * times)) for ids in windows]
        for index in range(self.decoder.layers):
            with self.decoder.layer(index) as module:
                fill(self.decoder, module, self.view, index, self.precision)
                states = [self.decoder.run(module, s, index) for s in states]
        with self.decoder.head():
            for s in states:
                yield StateRows(self.decoder, s.part(slice(0, 1)))

    def decode(self, ids: list[int], context: int) -> tuple[list[int], StateRows]:
        raise EvalError(f"{self.card.name}: expected a model in memory for the decode path, found --stream, which has none")

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        raise EvalError(f"{self.card.name}: expected a model in memory for answers, found --stream, which gives none")

    def close(self) -> None: ...
