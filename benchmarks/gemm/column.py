"""What a column of the table is: one implementation with one number format, for one shape."""

from typing import Protocol

import torch

from gemm.shapes import Shape


class Column(Protocol):
    """copies: weights that are there several times, at other addresses, so that no cache holds them. expert_bytes: that a call reads of each expert it routes to.
    tolerance: largest relative error (norms) against `reference`. compiles: a first call of each batch compiles for seconds, so batches warm up side by side."""

    copies: int
    expert_bytes: float
    tolerance: float
    compiles: bool
    notes: dict[str, object]

    def __call__(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """bf16 [tokens, hidden]. Launches only: no allocation outside PyTorch's, no synchronization; capturable."""
        ...

    def begin(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> object:
        """Only of ours: queues what comes before the first GEMM."""
        ...

    def reference(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
        """float32 [tokens, hidden] from this column's own dequantized weights; None where they are not at hand."""
        ...

    def close(self) -> None:
        """Gives its memory back."""
        ...


class Making(Protocol):
    """Of a module in gemm/columns. tokens: the batches that will be timed."""

    def make(self, shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> Column: ...
