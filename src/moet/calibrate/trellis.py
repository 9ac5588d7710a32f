"""`tcq2`: two-bit trellis codes with a UE5M3 scale per 32 columns (docs/row-format.md).

The level of a column depends on its own code and on the next one, so the codes of a word are a path through four
states, and the search is Viterbi's. Each survivor carries its own error feedback, and each candidate scale has its own
search. On a CPU the search is native code (native/calibrate/trellis.h), on a GPU these tensor operations.
"""

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from moet import native
from moet.calibrate.encode import Block
from moet.numerics.tcq2 import TCQ2_LEVELS
from moet.numerics.tcq2 import WORD_CODES as WORD

LEVELS = tuple(TCQ2_LEVELS.tolist())
TOP, SPREAD = 15.0, 6.9
"""The largest level. On normal data of deviation 1 the best scale is 1 / 6.9."""
CANDIDATES, FIRST_SHARE, SHARE_STEP = 8, 0.35, 0.8 / 7
"""Scales tried, in shares of the one that puts the group's largest magnitude at TOP. In shares of the group's deviation
they are too small for the second matrix, where error feedback leaves outliers that matter: 1.7 times the output error."""
_LAST = (0, 0, 3, 3)
"""The next code that the end of a word stands for: the sign bit, repeated."""


@dataclass(frozen=True)
class Trellis:
    """`moet.calibrate.encode.Codebook` of `tcq2`. portable: tensor operations on a CPU too."""

    portable: bool = False

    def multiplier(self, weight: torch.Tensor) -> torch.Tensor:
        """A power of two, so that scales lie about 1: 2**16 above it and 2**-15 below can be written."""
        deviation = weight.double().square().mean((1, 2)).sqrt() / SPREAD
        return torch.exp2(torch.log2(deviation.clamp(min=2.0**-100)).round()).float()

    def block(self, target: torch.Tensor, feedback: torch.Tensor, multiplier: torch.Tensor) -> Block:
        if target.device.type == "cpu" and not self.portable:
            return _native_block(target, feedback, multiplier)
        return _tensor_block(target, feedback, multiplier)


def scale_values(scales: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """float32 of UE5M3 bytes [G, ...], times the multiplier [G]."""
    bits = (scales.int() << 20) + (112 << 23)
    return bits.view(torch.float32) * multiplier.reshape(-1, *[1] * (scales.dim() - 1))


def scale_bytes(values: torch.Tensor, multiplier: torch.Tensor) -> torch.Tensor:
    """uint8: the bytes whose values are nearest to `values` [G, ...]."""
    bits = (values / multiplier.reshape(-1, *[1] * (values.dim() - 1))).clamp(min=2.0**-15).view(torch.int32)
    return ((bits - (112 << 23) + (1 << 19)) >> 20).clamp(max=255).to(torch.uint8)


def shares(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [CANDIDATES], as native code computes them."""
    steps = torch.arange(CANDIDATES, dtype=torch.float32, device=device)
    return (FIRST_SHARE + steps * torch.tensor(SHARE_STEP, dtype=torch.float32, device=device)) / TOP


def _tensor_block(target: torch.Tensor, feedback: torch.Tensor, multiplier: torch.Tensor) -> Block:
    count, rows, columns = target.shape
    device = target.device
    tried = scale_bytes(target.abs().amax(2)[:, :, None] * shares(device), multiplier)
    scale = scale_values(tried, multiplier)[..., None]  # [G, N, C, 1]
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device).view(4, 4).T.contiguous()
    shape = (count, rows, CANDIDATES, 4)
    left = target[:, :, None, None].expand(*shape, columns).clone()
    errors = torch.zeros_like(left)
    codes = torch.zeros(*shape, columns, dtype=torch.uint8, device=device)
    states = torch.arange(4, device=device, dtype=torch.uint8)
    codes[..., 0] = states
    cost = torch.zeros(shape, device=device)
    for k in range(columns):
        own = feedback[:, k, k][:, None, None, None]
        if k % WORD == WORD - 1 or k + 1 == columns:
            after = torch.tensor(_LAST if k % WORD == WORD - 1 else (0, 0, 0, 0), device=device)
            step = (left[..., k] - scale * levels[torch.arange(4, device=device), after]) / own
            cost = cost + step * step
            source = cost.argmin(3, keepdim=True)
            error = step.gather(3, source).expand(shape)
            cost = cost.gather(3, source).expand(shape)
            source = source.expand(shape)
        else:
            step = (left[..., k, None] - scale[..., None] * levels) / own[..., None]  # [..., code, next code]
            cost, source = (cost[..., None] + step * step).min(3)
            error = step.gather(3, source[..., None, :])[..., 0, :]
        index = source[..., None].expand(*shape, columns)
        left, errors, codes = left.gather(3, index), errors.gather(3, index), codes.gather(3, index)
        errors[..., k] = error
        if k + 1 < columns:
            codes[..., k + 1] = states
            left[..., k + 1 :] -= error[..., None] * feedback[:, None, None, None, k, k + 1 :]
    best = cost[..., 0].argmin(2, keepdim=True)
    index = best[..., None].expand(count, rows, 1, columns)
    codes = codes[:, :, :, 0].gather(2, index)[:, :, 0]
    errors = errors[:, :, :, 0].gather(2, index)[:, :, 0]
    scales = tried.gather(2, best)[..., 0]
    return Block(codes, scales, values_of(codes, scale_values(scales, multiplier)[..., None]), errors)


def values_of(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [G, N, n] of a group's codes [G, N, n] and its scale [G, N, 1]."""
    columns = codes.shape[-1]
    after = torch.zeros_like(codes)
    after[..., :-1] = codes[..., 1:]
    for k in range(WORD - 1, columns, WORD):
        after[..., k] = torch.tensor(_LAST, dtype=torch.uint8, device=codes.device)[codes[..., k].long()]
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=codes.device)
    return scale * levels[(codes + 4 * after).long()]


class _CBlock(ctypes.Structure):
    """moet::TrellisBlock of native/calibrate/trellis.h."""

    _fields_ = [
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int32), ("candidates", ctypes.c_int32),
        ("first_share", ctypes.c_float), ("share_step", ctypes.c_float), ("multiplier", ctypes.c_float), ("target", ctypes.c_void_p), ("target_stride", ctypes.c_int64),
        ("feedback", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("codes_stride", ctypes.c_int64),
        ("scales", ctypes.c_void_p), ("scales_stride", ctypes.c_int64), ("values", ctypes.c_void_p),
        ("values_stride", ctypes.c_int64), ("errors", ctypes.c_void_p),
    ]  # fmt: skip


@functools.cache
def _function():
    function = native.lib().moet_trellis_block
    function.argtypes = [ctypes.POINTER(_CBlock), ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t]
    return function


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def _native_block(
    target: torch.Tensor, feedback: torch.Tensor, multiplier: torch.Tensor, portable: bool = False
) -> Block:
    """portable: no vector instructions beyond the CPU's baseline; same bytes."""
    count, rows, columns = target.shape
    upper = torch.zeros(count, 32, 32)
    upper[:, :columns, :columns] = feedback
    codes = torch.empty(count, rows, columns, dtype=torch.uint8)
    scales = torch.empty(count, rows, dtype=torch.uint8)
    values, errors = torch.empty(count, rows, columns), torch.empty(count, rows, 32)
    if target.stride(2) != 1:
        target = target.contiguous()
    threads = len(os.sched_getaffinity(0))
    share = -(-count * rows // threads)  # rows of a thread
    step = min(rows, -(-share // 8) * 8)

    def one(at: tuple[int, int]) -> None:
        g, begin = at
        part = (g, slice(begin, begin + step))
        block = _CBlock(
            len(target[part]), columns, CANDIDATES, FIRST_SHARE, SHARE_STEP, float(multiplier[g]),
            target[part].data_ptr(), target.stride(1), upper[g].data_ptr(), codes[part].data_ptr(), columns,
            scales[part].data_ptr(), 1, values[part].data_ptr(), columns, errors[part].data_ptr(),
        )  # fmt: skip
        native.call(_function(), ctypes.byref(block), portable)

    for _ in _pool().map(one, [(g, begin) for g in range(count) for begin in range(0, rows, step)]):
        pass
    return Block(codes, scales, values, errors[:, :, :columns])
