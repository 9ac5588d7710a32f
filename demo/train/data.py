"""Training windows out of token files."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [T] uint16, starts [D + 1]) of a token file."""
    with np.load(path) as file:
        return file["tokens"], file["starts"]


def contiguous(tokens: np.ndarray, starts: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    """Documents in random order, cut into windows [W, width]; the windows overlap by two tokens.

    The overlap holds the targets of the last positions, so every token is predicted.
    """
    order = rng.permutation(len(starts) - 1)
    stream = np.concatenate([tokens[starts[i] : starts[i + 1]] for i in order])
    first = np.arange(0, len(stream) - width, width - 2)
    return np.lib.stride_tricks.sliding_window_view(stream, width)[first]


def aligned(tokens: np.ndarray, starts: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    """Conversations in random order, windows [W, width] that begin where a conversation does, as a request does."""
    rows, row, size = [], [], 0
    for i in rng.permutation(len(starts) - 1):
        row.append(tokens[starts[i] : starts[i + 1]])
        size += len(row[-1])
        if size >= width:
            rows.append(np.concatenate(row)[:width])
            row, size = [], 0
    return np.stack(rows)


class Epochs:
    """Endless shuffled windows of both token files; the next epoch is made while this one is used."""

    def __init__(self, work: Path, length: int, seed: int):
        self.text, self.chat = load(work / "text.npz"), load(work / "chat.npz")
        self.width, self.seed, self.epoch = length + 2, seed, 0
        self.pool = ThreadPoolExecutor(1)
        self.next: Future = self.pool.submit(self._make, 0)

    def _make(self, epoch: int) -> torch.Tensor:
        rng = np.random.default_rng((self.seed, epoch))
        windows = np.concatenate(
            (contiguous(*self.text, self.width, rng), aligned(*self.chat, self.width, rng))
        )
        return torch.from_numpy(rng.permutation(windows).astype(np.int16))

    def batches(self, size: int, device: str):
        """Yields int64 [size, length + 2] for ever."""
        while True:
            windows = self.next.result().to(device)
            self.epoch += 1
            self.next = self.pool.submit(self._make, self.epoch)
            for first in range(0, len(windows) - size + 1, size):
                yield windows[first : first + size].long()
