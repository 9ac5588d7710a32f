"""The expert MLP in plain numpy, float64: the oracle of the kernels. Its decoder is its own, written from docs/row-format.md alone."""

from collections.abc import Callable

import numpy as np

from moet.layout import RowGeometry
from moet.models import Activation

_SYM2 = np.array([-4, -1, 1, 4], np.float64)
_TCQ2 = np.array([3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3], np.float64)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float64 values of OCP E4M3 codes (0x7f and 0xff are NaN)."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -value, value))


def decode_blocks(format: str, blocks: np.ndarray) -> np.ndarray:
    """float64 [..., 64, 32] values of blocks, uint8 [..., block_bytes]; the matrix multiplier left out."""
    bits = {"sym2": 2, "tcq2": 2, "mxfp4": 4, "nvfp4": 4, "fp8": 8, "fp8_row": 8, "bf16": 16}[format]
    lead = blocks.shape[:-1]
    words = np.ascontiguousarray(blocks[..., : 256 * bits]).view("<u4").reshape(*lead, bits, 64)
    codes = (words[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)) & ((1 << bits) - 1)   # [..., steps, rows, codes a word]
    codes = np.moveaxis(codes, -2, -3).reshape(*lead, 64, 32)
    scales = np.ascontiguousarray(blocks[..., 256 * bits :])
    if format == "tcq2":
        following = np.roll(codes, -1, axis=-1)
        following[..., 15::16] = (codes[..., 15::16] >> 1) * 3   # the end of a word: its high bit twice
        return _TCQ2[codes + 4 * following] * (2.0 ** (scales // 8 - 15.0) * (1 + scales % 8 / 8))[..., None]
    if format == "sym2":
        return _SYM2[codes] * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    if format in ("mxfp4", "nvfp4"):
        values = np.where(codes & 8, -1.0, 1.0) * _E2M1[codes & 7]
        if format == "mxfp4":
            return values * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
        return values * np.repeat(np.swapaxes(e4m3(scales.reshape(*lead, 2, 64)), -1, -2), 16, axis=-1)
    if format == "fp8":
        return e4m3(codes) * np.repeat(scales.view("<f4")[..., :2].astype(np.float64), 32, axis=-1)[..., None]
    if format == "fp8_row":
        return e4m3(codes) * scales.view("<f4").astype(np.float64)[..., None]
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def decode_row(geometry: RowGeometry, row: np.ndarray) -> tuple[np.ndarray, ...]:
    """gate, up [inter_padded, hidden_padded], down [hidden_padded, inter_padded], their biases (zeros if there are none); float64."""
    g = geometry
    tiles = row[: g.w2_offset].reshape(g.tiles, g.w13_tile_bytes)
    k_blocks = g.hidden_padded // 32
    w13 = decode_blocks(g.format, tiles[:, : k_blocks * g.block_bytes].reshape(g.tiles, k_blocks, g.block_bytes))
    w13 = w13.transpose(0, 2, 1, 3).reshape(g.tiles, 64, g.hidden_padded)
    w2 = decode_blocks(g.format, row[g.w2_offset : g.extras_offset].reshape(g.tiles, g.hidden_padded // 64, g.block_bytes))
    down = w2.transpose(1, 2, 0, 3).reshape(g.hidden_padded, g.inter_padded)
    extras = row[g.extras_offset :]
    multipliers = extras[:12].view("<f4").astype(np.float64)
    bias13, bias2 = np.zeros((g.tiles, 64)), np.zeros(g.hidden_padded)
    if g.biased:
        bias13 = np.ascontiguousarray(tiles[:, -256:]).view("<f4").astype(np.float64)
        bias2 = extras[16 : 16 + 4 * g.hidden_padded].view("<f4").astype(np.float64)
    gate, up = (w13[:, s].reshape(g.inter_padded, g.hidden_padded) for s in (slice(0, 32), slice(32, 64)))
    return gate * multipliers[0], up * multipliers[1], down * multipliers[2], bias13[:, :32].ravel(), bias13[:, 32:].ravel(), bias2


def activate(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The function between the two GEMMs, as moet.models.Activation defines it; gate and up are not changed."""
    if activation.limit is not None:
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    alpha = activation.alpha if activation.kind == "swiglu_oai" else 1.0
    with np.errstate(over="ignore"):   # gate / inf is the right zero
        swished = gate / (1 + np.exp(-alpha * gate))
    return swished * (up + 1) if activation.kind == "swiglu_oai" else swished * up


def expert_mlp(
    geometry: RowGeometry, row: np.ndarray, x: np.ndarray, activation: Activation, *, rank: int = 0, world: int = 1, magnitude: bool = False,
    rounded: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    """float64 [tokens, hidden]; arguments as of `moet.kernels.expert_mlp`.

    rounded: what a number format makes of activations, x and the values between the GEMMs; nothing by default.

    magnitude: instead, sum |down| |a| + |bias|, where a = |activation| with the error that relative errors of gate and up sums would bring
    (sum |w||x| of each, times the function's slope, which is below 2 in g relative to |u|, and in u relative to |g|): what float32 rounding scales with.
    """
    g, part = geometry, geometry.slice(rank, world)
    gate, up, down, gate_bias, up_bias, down_bias = decode_row(g, row)
    rounded = rounded or (lambda values: values)
    x = np.pad(rounded(x.astype(np.float64)), ((0, 0), (0, g.hidden_padded - g.hidden)))
    columns = slice(part.tile_begin * 32, min(part.tile_end * 32, g.inter))   # the padded intermediate values reach nothing
    gates, ups = (x @ m[columns].T + b[columns] for m, b in ((gate, gate_bias), (up, up_bias)))
    middle = rounded(activate(activation, gates, ups))
    if magnitude:
        gate_size, up_size = (np.abs(x) @ np.abs(m[columns]).T + np.abs(b[columns]) for m, b in ((gate, gate_bias), (up, up_bias)))
        middle = np.abs(middle) + 2 * gate_size * (np.abs(ups) + 1) + 2 * up_size * (np.abs(gates))
        down, down_bias = np.abs(down), np.abs(down_bias)
    return (middle @ down[:, columns].T + (down_bias if rank == 0 else 0))[:, : g.hidden]
