"""Sequential error feedback (GPTQ: Frantar et al., 2022, algorithm 1) for levels -4, -1, +1, +4 times a power of
two per 32 columns: the rows of docs/row-format.md's `sym2`."""

from dataclasses import dataclass

import torch

GROUP = 32
BLOCK = 128
DAMPING = 0.01
"""Of the Hessian's mean diagonal."""


@dataclass(frozen=True)
class Codes:
    """G matrices at 2 bits.

    codes uint8 [G, N, K], 0 to 3 for -4, -1, +1, +4; scales uint8 [G, N, ceil(K / 32)]; multiplier float32 [G];
    values float32 [G, N, K]: what they mean
    """

    codes: torch.Tensor
    scales: torch.Tensor
    multiplier: torch.Tensor
    values: torch.Tensor


def encode_matrix(weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor | None = None) -> Codes:
    """weight: float32 [G, N, K]; hessian: float32 [G, K, K], E x x^T of the inputs x; cross: E f x^T, of the inputs f
    that the output is wanted for: then the target is the least-squares one, weight cross hessian^-1."""
    count, rows, columns = weight.shape
    diagonal = hessian.diagonal(dim1=1, dim2=2).mean(1)
    damping = torch.where(diagonal > 0, DAMPING * diagonal, torch.ones_like(diagonal))
    eye = torch.eye(columns, device=weight.device)
    damped = hessian + damping[:, None, None] * eye
    lower = torch.linalg.cholesky(damped)
    if cross is None:
        target = weight.clone()
    else:
        moved = weight @ (cross + damping[:, None, None] * eye)
        target = torch.cholesky_solve(moved.mT, lower).mT.contiguous()
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(count, rows, -(-columns // GROUP), dtype=torch.uint8, device=weight.device)
    values = torch.empty_like(weight)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.empty(count, rows, end - begin, device=weight.device)
        for k in range(begin, end):
            if k % GROUP == 0:
                exponent = _exponents(target[:, :, k : min(k + GROUP, columns)])
                scales[:, :, k // GROUP] = (exponent + 127).to(torch.uint8)
                unit = torch.exp2(exponent)
            w = target[:, :, k]
            large = w.abs() > 2.5 * unit
            negative = torch.signbit(w)
            codes[:, :, k] = torch.where(negative, 1 - large.to(torch.uint8), 2 + large.to(torch.uint8))
            q = torch.where(large, 4 * unit, unit)
            q = torch.where(negative, -q, q)
            values[:, :, k] = q
            error = (w - q) / inverse[:, k, k][:, None]
            target[:, :, k:end] -= error[:, :, None] * inverse[:, None, k, k:end]
            errors[:, :, k - begin] = error
        target[:, :, end:] -= errors @ inverse[:, begin:end, end:]
    return Codes(codes, scales, torch.ones(count, device=weight.device), values)


def _exponents(block: torch.Tensor) -> torch.Tensor:
    """float32 [G, N]: of five candidates the exponent with the smallest error, as docs/quantization.md defines."""
    largest = block.abs().amax(2)
    top = torch.frexp(largest).exponent.float() - 1
    top = torch.where(largest > 0, top, torch.full_like(top, -127.0))
    best, least = top, torch.full_like(top, float("inf"))
    for step in range(5):
        exponent = (top - step).clamp(-126, 127)
        unit = torch.exp2(exponent)[:, :, None]
        q = torch.where(block.abs() > 2.5 * unit, 4 * unit, unit)
        error = (block.abs() - q).square().sum(2)
        better = error < least
        best, least = torch.where(better, exponent, best), torch.where(better, error, least)
    return best
