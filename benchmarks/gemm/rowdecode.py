"""Values of a row, with torch on the row's device (docs/row-format.md). In float64 every weight is exact; the numpy reference of the kernels has a decoder of its own."""

import torch

from gemm.reference import Matrices
from gemm.rowfill import biases_of, blocks_of
from moet.layout import RowGeometry

_SYM2 = (-4, -1, 1, 4)
_TCQ2 = (3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def _look_up(table: tuple[float, ...], codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(table, dtype=dtype, device=codes.device)[codes]


def _e4m3(bytes_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float8_e4m3fn).to(dtype)


def _codes(g: RowGeometry, blocks: torch.Tensor) -> torch.Tensor:
    """int64 [..., 64, 32]."""
    words = blocks[..., : g.block_code_bytes].contiguous().view(torch.int32).unflatten(-1, (g.bits, 64))
    shifts = torch.arange(32 // g.bits, device=blocks.device, dtype=torch.int32) * g.bits
    codes = (words[..., None] >> shifts) & ((1 << g.bits) - 1)
    return codes.movedim(-2, -3).flatten(-2).long()   # [..., row, step, code] -> [..., row, column]


def decode(g: RowGeometry, blocks: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """dtype [..., 64, 32] of blocks uint8 [..., block_bytes], the matrix's multiplier left out."""
    if g.format == "bf16":
        return blocks.contiguous().view(torch.bfloat16).unflatten(-1, (16, 64, 2)).movedim(-3, -2).flatten(-2).to(dtype)
    codes, scales = _codes(g, blocks), blocks[..., g.block_code_bytes :].contiguous()
    if g.format == "tcq2":
        following = codes.roll(-1, -1)
        following[..., 15::16] = (codes[..., 15::16] >> 1) * 3   # the end of a word: its high bit twice
        s = scales.to(dtype)
        return _look_up(_TCQ2, codes + 4 * following, dtype) * (torch.exp2((s / 8).floor() - 15) * (1 + s % 8 / 8))[..., None]
    if g.format in ("sym2", "mxfp4"):
        return _look_up(_SYM2 if g.format == "sym2" else _E2M1, codes, dtype) * torch.exp2(scales.to(dtype) - 127)[..., None]
    if g.format == "nvfp4":
        halves = _e4m3(scales, dtype).unflatten(-1, (2, 64)).transpose(-1, -2)
        return _look_up(_E2M1, codes, dtype) * halves.repeat_interleave(16, -1)
    floats = scales.view(torch.float32).to(dtype)
    per_row = floats[..., :2].repeat_interleave(32, -1) if g.format == "fp8" else floats
    return _e4m3(codes.to(torch.uint8), dtype) * per_row[..., None]


def matrices(g: RowGeometry, row: torch.Tensor, dtype: torch.dtype = torch.float32) -> Matrices:
    """row: uint8 [row_bytes]. gate, up [inter, hidden], down [hidden, inter], and their biases or None."""
    rows = row[None]
    w13, w2 = (decode(g, b[0], dtype) for b in blocks_of(g, rows))
    multipliers = row[g.extras_offset : g.extras_offset + 12].clone().view(torch.float32).to(dtype)
    strips = w13.transpose(1, 2).flatten(2)   # [tiles, 64, hidden_padded]
    gate, up = (strips[:, s].flatten(0, 1)[: g.inter, : g.hidden] for s in (slice(0, 32), slice(32, 64)))
    down = w2.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)[: g.hidden, : g.inter]
    biases: tuple[torch.Tensor | None, ...] = (None, None, None)
    if g.biased:
        b13, b2 = (b.to(dtype) for b in biases_of(g, rows))
        biases = (b13[0, :, :32].reshape(-1)[: g.inter], b13[0, :, 32:].reshape(-1)[: g.inter], b2[0, : g.hidden])
    return gate * multipliers[0], up * multipliers[1], down * multipliers[2], *biases
