"""Calibrated encoding of matrices: error feedback along K, a group of 32 columns at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

GROUP = 32
"""Columns that share a scale."""
FAR = 10.0
"""A fit that is farther from the matrix than this many times the matrix's own size is none: its inputs are all but zero."""
SPAN = 128
"""Columns whose errors are fed back to all later ones in one product: fewer passes over the matrix."""
DAMPING = 0.01
"""Of the Hessian's mean diagonal, added to its diagonal."""
RIDGE = 0.3
"""The same for the fit of the target: it has as many unknowns as the matrix has weights, rounding has none. KL of the demo
at 0.02, 0.1, 0.5: 0.228, 0.226, 0.217."""


@dataclass(frozen=True)
class Codes:
    """G matrices at 2 bits.

    codes uint8 [G, N, K], 0 to 3; scales uint8 [G, N, ceil(K / 32)]; multiplier float32 [G];
    values float32 [G, N, K]: what they mean
    """

    codes: torch.Tensor
    scales: torch.Tensor
    multiplier: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Block:
    """A group of n columns: codes uint8 [G, N, n], scales uint8 [G, N], values float32 [G, N, n], errors float32
    [G, N, n]: (target - value) / U[k, k] of each column, feedback from the group's own columns included."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor
    errors: torch.Tensor


class Codebook(Protocol):
    """How a group of columns is written: levels, scale format, and the search for both."""

    def multiplier(self, weight: torch.Tensor) -> torch.Tensor:
        """float32 [G] for weight [G, N, K]: what all scales of a matrix are times."""
        ...

    def block(self, target: torch.Tensor, feedback: torch.Tensor, multiplier: torch.Tensor) -> Block:
        """target float32 [G, N, n], n <= 32; feedback float32 [G, n, n]: U of these columns."""
        ...


def encode_matrix(
    codebook: Codebook,
    weight: torch.Tensor,
    hessian: torch.Tensor | None = None,
    wanted: torch.Tensor | None = None,
    ridge: torch.Tensor | float = RIDGE,
) -> Codes:
    """The codes whose output is nearest to what is wanted (GPTQ: Frantar et al., 2022).

    weight   float32 [G, N, K]
    hessian  float32 [G, K, K]: E x x^T over the matrix's inputs x. None: every weight by itself
    wanted   float32 [G, N, K]: E y x^T of the outputs y that are wanted for those inputs; the target is then the
             least-squares matrix, drawn towards `weight` by `ridge`. None: the weight's own outputs
    ridge    of the Hessian's mean diagonal; a number, or [G]
    """
    count, rows, columns = weight.shape
    target = weight.clone() if wanted is None else fitted(weight, hessian, wanted, ridge)
    upper = None if hessian is None else feedback(hessian)
    multiplier = codebook.multiplier(weight)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(count, rows, -(-columns // GROUP), dtype=torch.uint8, device=weight.device)
    values = torch.empty_like(target)
    for start in range(0, columns, SPAN):
        stop = min(start + SPAN, columns)
        errors = torch.empty(count, rows, stop - start, device=weight.device)
        for begin in range(start, stop, GROUP):
            end = min(begin + GROUP, stop)
            part = slice(begin, end)
            own = _identity(count, end - begin, weight) if upper is None else upper[:, part, part]
            block = codebook.block(target[:, :, part], own, multiplier)
            codes[:, :, part], scales[:, :, begin // GROUP] = block.codes, block.scales
            values[:, :, part], errors[:, :, begin - start : end - start] = block.values, block.errors
            if upper is not None and end < stop:
                target[:, :, end:stop] -= block.errors @ upper[:, part, end:stop]
        if upper is not None and stop < columns:
            target[:, :, stop:] -= errors @ upper[:, start:stop, stop:]
    return Codes(codes, scales, multiplier, values)


def fitted(
    weight: torch.Tensor, hessian: torch.Tensor, wanted: torch.Tensor, ridge: torch.Tensor | float
) -> torch.Tensor:
    """argmin over W of E |y - W x|^2 + ridge |W - weight|^2, float32 [G, N, K]; `weight` itself where that is FAR off."""
    amount = _mean_diagonal(hessian) * ridge
    right = (wanted + amount[:, None, None] * weight).mT
    fit = _each(lambda h, r: torch.cholesky_solve(r, torch.linalg.cholesky(h)), _added(hessian, amount), right).mT
    far = (fit - weight).norm(dim=(1, 2)) > FAR * weight.norm(dim=(1, 2))
    return torch.where(far[:, None, None], weight, fit).contiguous()


def feedback(hessian: torch.Tensor) -> torch.Tensor:
    """U [G, K, K], upper: U^T U is the damped Hessian's inverse. An input that never was is 1 with nothing else."""
    dead = hessian.diagonal(dim1=1, dim2=2) <= 0
    damped = _added(hessian, _mean_diagonal(hessian) * DAMPING)
    damped.diagonal(dim1=1, dim2=2).add_(dead.to(hessian.dtype))
    return _each(lambda h: torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True), damped)


def _each(function: Callable[..., torch.Tensor], *batches: torch.Tensor) -> torch.Tensor:
    """Matrix by matrix: a GPU's batched factorizations are made for small matrices, and these have up to 7168 columns."""
    return torch.stack([function(*matrices) for matrices in zip(*batches, strict=True)])


def _mean_diagonal(hessian: torch.Tensor) -> torch.Tensor:
    """[G]; 1 where nothing was ever put in."""
    mean = hessian.diagonal(dim1=1, dim2=2).mean(1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _added(hessian: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
    out = hessian.clone()
    out.diagonal(dim1=1, dim2=2).add_(amount[:, None])
    return out


def _identity(count: int, size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.eye(size, device=like.device, dtype=like.dtype).expand(count, -1, -1)
