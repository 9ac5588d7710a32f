"""Rows of random codes made on the device, every field in its place: scales from a narrow range, so that states and results stay near 1."""

import torch

from moet.layout import RowGeometry

SCALES = {"sym2": (118, 2), "tcq2": (40, 8), "mxfp4": (118, 2), "nvfp4": (0x38, 8)}
"""Lowest scale byte and how many follow it. With MULTIPLIERS a weight is about 2^-6.4 (nvfp4 2^-6)."""
MULTIPLIERS = {"nvfp4": 2.0**-8}
FLOAT_SCALE = 0.02
"""fp8: of a granule or row, times 0.5 to 1.5. Codes keep below 2: bit 6 is cleared, so none is a NaN."""
DEVIATION = 0.015
"""bf16: of a weight."""
CHUNK = 1 << 28


def random_bytes(out: torch.Tensor, generator: torch.Generator) -> None:
    """Fills a contiguous uint8 tensor; its bytes are a multiple of 8."""
    out.view(-1).view(torch.int64).random_(-(1 << 63), (1 << 63) - 1, generator=generator)


def blocks_of(g: RowGeometry, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a pool, uint8 [rows, row_bytes]: w13's blocks [rows, tiles, hidden / 32, block_bytes] and w2's [rows, tiles, hidden / 64, block_bytes]."""
    k_blocks = g.hidden_padded // 32
    w13 = rows[:, : g.w2_offset].unflatten(1, (g.tiles, g.w13_tile_bytes))[..., : k_blocks * g.block_bytes].unflatten(2, (k_blocks, g.block_bytes))
    w2 = rows[:, g.w2_offset : g.extras_offset].unflatten(1, (g.tiles, g.hidden_padded // 64, g.block_bytes))
    return w13, w2


def biases_of(g: RowGeometry, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views: gate's and up's [rows, tiles, 64], down's [rows, hidden_padded]; float32, of a biased geometry."""
    w13 = rows[:, : g.w2_offset].unflatten(1, (g.tiles, g.w13_tile_bytes))[..., -256:].view(torch.float32)
    return w13, rows[:, g.bias_offset : g.bias_offset + 4 * g.hidden_padded].view(torch.float32)


def _numbers(g: RowGeometry, rows: torch.Tensor, generator: torch.Generator) -> None:
    """What random bytes are not fit for: scales, codes that may be no NaN, biases, the multipliers. along: the dimension in which a row's blocks follow each other."""
    for along, blocks in zip((2, 1), blocks_of(g, rows), strict=True):
        codes, scales = blocks[..., : g.block_code_bytes], blocks[..., g.block_code_bytes :]
        if g.format in SCALES:
            low, span = SCALES[g.format]
            scales %= span
            scales += low
        elif g.format.startswith("fp8"):
            codes &= 0xBF
            count = 2 if g.format == "fp8" else 64
            values = torch.rand((*blocks.shape[:-1], count), device=rows.device, generator=generator) + 0.5
            if g.format == "fp8_row":   # a scale of a row: the same in all of its blocks
                values = values.narrow(along, 0, 1)
            scales.zero_()
            scales.view(torch.float32)[..., :count] = FLOAT_SCALE * values
        else:
            codes.view(torch.bfloat16).normal_(0, DEVIATION, generator=generator)
    if g.biased:
        for biases in biases_of(g, rows):
            biases.normal_(0, 0.1, generator=generator)
    multiplier = torch.tensor([MULTIPLIERS.get(g.format, 1.0)] * 3 + [0.0], device=rows.device)
    rows[:, g.extras_offset : g.extras_offset + 16] = multiplier.view(torch.uint8)


def fill(g: RowGeometry, rows: torch.Tensor, seed: int) -> None:
    """rows: uint8 [n, row_bytes], contiguous, on any device. Checksums are left at random: kernels do not read them."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    per = max(1, CHUNK // g.row_bytes)
    for start in range(0, len(rows), per):
        part = rows[start : start + per]
        random_bytes(part, generator)
        _numbers(g, part, generator)
