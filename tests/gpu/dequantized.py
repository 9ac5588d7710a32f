"""The expert MLP in torch's float64, on the device that the kernels run on, and how far from it their roundings may take a result.

Roundings, of relative error 2^-8 each where they are to bf16 (half a unit in the last of 8 bits), 2^-11 where to float16 (FP8's), or of absolute error 2^-15 of the largest magnitude of
32 columns where to two int8 planes: activations on their way in (exact where they stay bf16), values between the GEMMs, an expert's answer (bf16), the layer's (bf16); in the large kernels a weight of FP8
with its granule's scale (bf16). Sums are float32.

`worst`: no result may be further off, whatever the roundings do. `spread`: standard deviation of the result if roundings are uniform and independent, each taken at its
largest; the root mean square over a token's columns is held to three of them. That is what finds a lost column, which hides in `worst`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from moet.kernels.expert_mlp import reference
from moet.kernels.expert_mlp.cuda import NUMBERS
from moet.layout import RowGeometry
from moet.models import Activation

BF16, HALF, PLANES = 2.0**-8, 2.0**-11, 2.0**-15
HALF_UNIT = 2.0**-38
"""Of the largest magnitude of 32 columns, which is 2^14 and more of a float16's smallest numbers, 2^-24."""
TINY, TINY_PLANES = 2.0**-126, 2.0**-112
"""Smaller numbers may be flushed to zero; in planes, whose powers of two end at -111."""
TINY_SUM = 2.0**-103
"""And a sum of 32 columns of planes, of up to 15 * 32 * 32639 units, where a unit is below 2^-127."""
TINY_UNIT = 2.0**-109
"""And a product in the large kernels of FP8, where it is 2^-40 of its value (columns.cuh)."""
LEAST = 6 * 2.0**-127
"""Weights up to here may be those of UE8M0's least scale, which counts as zero in the small kernels."""
SLOPE = 1.1
"""Largest slope of x * sigmoid(alpha * x), for every alpha (at 2.4 / alpha)."""
FUNCTION = 2.0**-16
"""Relative error of the activation function in float32, at most: an exponential's argument, below 104 where it counts, is rounded to 2^-24 of it; it and the reciprocal are
approximate (2^-22); three roundings follow."""


def accumulation(terms: int) -> float:
    """Relative to the sum of magnitudes: an MMA adds 16 products to its sum and may cut 2^-22 of the largest one off; then come warps' sums, multiplier and bias."""
    return (terms / 16 + 16) * 2.0**-22


@dataclass(frozen=True)
class Expert:
    """float64: gate, up [inter, hidden], down [hidden, inter] and biases, without padding. numbers: what the small kernels multiply with (NUMBERS)."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor
    up_bias: torch.Tensor
    down_bias: torch.Tensor
    numbers: int = 0

    def part(self, geometry: RowGeometry, rank: int, world: int) -> Self:
        """What a tensor-parallel rank computes with."""
        tiles = geometry.slice(rank, world)
        mine = slice(32 * tiles.tile_begin, 32 * tiles.tile_end)
        down_bias = self.down_bias if rank == 0 else torch.zeros_like(self.down_bias)
        return type(self)(self.gate[mine], self.up[mine], self.down[:, mine], self.gate_bias[mine], self.up_bias[mine], down_bias, self.numbers)


def decode_blocks(format: str, bits: int, blocks: torch.Tensor) -> torch.Tensor:
    """float64 [..., 64, 32] of uint8 [..., block_bytes], with reference's tables; the matrix's multiplier left out."""
    lead, device = blocks.shape[:-1], blocks.device
    table = lambda values: torch.from_numpy(values).to(device)
    words = blocks[..., : 256 * bits].contiguous().view(torch.int32).view(*lead, bits, 64, 1)
    codes = (words >> (torch.arange(32 // bits, dtype=torch.int32, device=device) * bits)) & ((1 << bits) - 1)
    codes = codes.transpose(-2, -3).reshape(*lead, 64, 32)
    scales = blocks[..., 256 * bits :].contiguous()
    if format == "tcq2":
        following = torch.roll(codes, -1, -1)
        following[..., 15::16] = (codes[..., 15::16] >> 1) * 3
        return table(reference._TCQ2)[codes + 4 * following] * ((scales % 8).double() / 8 + 1).mul(torch.exp2((scales // 8).double() - 15))[..., None]
    if format == "sym2":
        return table(reference._SYM2)[codes] * torch.exp2(scales.double() - 127)[..., None]
    e4m3 = table(reference.e4m3(np.arange(256)))
    if format in ("mxfp4", "nvfp4"):
        values = table(np.concatenate([reference._E2M1, -reference._E2M1]))[codes]
        if format == "mxfp4":
            return values * torch.exp2(scales.double() - 127)[..., None]
        return values * e4m3[scales.int()].view(*lead, 2, 64).transpose(-1, -2).repeat_interleave(16, -1)
    if format == "fp8":
        return e4m3[codes] * scales.view(torch.float32)[..., :2].double().repeat_interleave(32, -1)[..., None]
    if format == "fp8_row":
        return e4m3[codes] * scales.view(torch.float32).double()[..., None]
    return (codes << 16).view(torch.float32).double()


def decode(geometry: RowGeometry, row: torch.Tensor) -> Expert:
    """row: uint8 [row_bytes]."""
    g, row, k_blocks = geometry, row.contiguous(), geometry.hidden_padded // 32
    tiles = row[: g.w2_offset].view(g.tiles, g.w13_tile_bytes)
    w13 = decode_blocks(g.format, g.bits, tiles[:, : k_blocks * g.block_bytes].reshape(g.tiles, k_blocks, g.block_bytes))
    w13 = w13.transpose(1, 2).reshape(g.tiles, 2, 32, g.hidden_padded)[..., : g.hidden]
    w2 = decode_blocks(g.format, g.bits, row[g.w2_offset : g.extras_offset].view(g.tiles, g.hidden_padded // 64, g.block_bytes))
    down = w2.permute(1, 2, 0, 3).reshape(g.hidden_padded, g.inter_padded)[: g.hidden, : g.inter]
    multipliers = row[g.extras_offset : g.extras_offset + 12].clone().view(torch.float32).double()
    bias, down_bias = torch.zeros(g.tiles, 2, 32, device=row.device).double(), torch.zeros(g.hidden, device=row.device).double()
    if g.biased:
        bias = tiles[:, -256:].contiguous().view(torch.float32).double().view(g.tiles, 2, 32)
        down_bias = row[g.bias_offset : g.bias_offset + 4 * g.hidden].clone().view(torch.float32).double()
    rows = lambda m, which: m[:, which].reshape(g.inter_padded, *m.shape[3:])[: g.inter]
    return Expert(rows(w13, 0) * multipliers[0], rows(w13, 1) * multipliers[1], down * multipliers[2], rows(bias, 0), rows(bias, 1), down_bias, NUMBERS[g.format])


def activate(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate * sigmoid(alpha * gate), what it is multiplied with)."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    oai = activation.kind == "swiglu_oai"
    return gate * torch.sigmoid(gate * (activation.alpha if oai else 1.0)), up + oai


def of_blocks(values: torch.Tensor, numbers: int) -> torch.Tensor:
    """Largest error that the largest value of 32 columns gives to all of them: planes' steps, or a float16's smallest numbers."""
    columns = values.shape[1]
    blocks = torch.nn.functional.pad(values.abs(), (0, -columns % 32)).view(len(values), -1, 32)
    return (blocks.amax(-1) * (PLANES, HALF_UNIT)[numbers] + TINY_PLANES).repeat_interleave(32, -1)[:, :columns]


def rounded(values: torch.Tensor, small: bool | None, numbers: int = 0) -> torch.Tensor:
    """Largest error of rounding values [n, columns] once, as the small kernels do it, to bf16 as the large ones do it, or (None) either; they may be magnitudes."""
    bf16 = values.abs() * BF16 + TINY
    if small is False or numbers == 2:
        return bf16
    own = of_blocks(values, numbers)
    if numbers == 1:
        own = own + values.abs() * HALF
    return own if small else torch.maximum(own, bf16)


def arriving(x: torch.Tensor, small: bool | None, numbers: int) -> torch.Tensor:
    """The same of values that are bf16, which a float16 holds but for its smallest numbers."""
    return torch.zeros_like(x) if small is False or numbers == 2 else of_blocks(x, numbers)


@dataclass(frozen=True)
class Sum:
    """Of products: the value, its largest error, and its variance by roundings."""

    value: torch.Tensor
    worst: torch.Tensor
    variance: torch.Tensor


def product(values: torch.Tensor, worst: torch.Tensor, variance: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor, tiny: float) -> Sum:
    """values [n, K] @ matrix [N, K]^T + bias. tiny: a product below it may be flushed to zero."""
    size, cut = matrix.abs(), accumulation(matrix.shape[1])
    flushed = matrix.shape[1] * tiny + values.abs() @ torch.where(size <= LEAST, size, 0.0).T
    error = (worst + cut * values.abs()) @ size.T + cut * bias.abs() + matrix.shape[1] / 32 * TINY_SUM + flushed
    return Sum(values @ matrix.T + bias, error, variance @ matrix.square().T + flushed**2 / 3)


def expert_mlp(e: Expert, x: torch.Tensor, activation: Activation, small: bool | None) -> Sum:
    """x float64 [n, hidden] -> the expert's answer, rounded to bf16."""
    # A weight's relative error, as if the value it is multiplied with had it.
    of_weight, tiny = (BF16, TINY_UNIT) if e.numbers == 1 and not small else (0.0, 0.0)
    of_x = arriving(x, small, e.numbers)
    gate, up = (product(x, of_x + of_weight * x.abs(), (of_x.square() + (of_weight * x).square()) / 3, m, b, tiny) for m, b in ((e.gate, e.gate_bias), (e.up, e.up_bias)))
    swish, factor = activate(activation, gate.value, up.value)
    middle = swish * factor
    worst = SLOPE * gate.worst * (factor.abs() + up.worst) + swish.abs() * up.worst
    worst += FUNCTION * (middle.abs() + worst)
    variance = SLOPE**2 * factor.square() * gate.variance + swish.square() * up.variance
    worst += rounded(middle.abs() + worst, small, e.numbers) + of_weight * (middle.abs() + worst)
    variance += (rounded(middle, small, e.numbers).square() + (of_weight * middle).square()) / 3
    answer = product(middle, worst, variance, e.down, e.down_bias, tiny)
    return Sum(answer.value, answer.worst + rounded(answer.value.abs() + answer.worst, False), answer.variance + rounded(answer.value, False).square() / 3)


@dataclass(frozen=True)
class Expected:
    """float64 [tokens, hidden]. routed: [tokens], whether any place of a token counts."""

    out: torch.Tensor
    worst: torch.Tensor
    spread: torch.Tensor
    routed: torch.Tensor


def layer(
    experts: Mapping[int, Expert], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: Activation, many: int | None
) -> Expected:
    """What DeviceRuntime.forward computes, experts with `many` pairs or more by the large kernels and others by the small ones, or (None) by either. ids: places whose id names none of `experts` count nothing; one that is there twice counts twice."""
    out, worst, variance = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(3))
    size, routed = torch.zeros_like(out), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for number, expert in experts.items():
        tokens, places = torch.nonzero(ids == number, as_tuple=True)
        if not len(tokens):
            continue
        answer, w = expert_mlp(expert, x[tokens].double(), activation, None if many is None else len(tokens) < many), weights[tokens, places, None].double()
        out.index_add_(0, tokens, w * answer.value)
        worst.index_add_(0, tokens, w.abs() * answer.worst)
        variance.index_add_(0, tokens, w.square() * answer.variance)
        size.index_add_(0, tokens, w.abs() * (answer.value.abs() + answer.worst))
        routed[tokens] = True
    worst += (ids.shape[1] + 1) * 2.0**-23 * size
    worst += rounded(out.abs() + worst, False)
    return Expected(out, worst, (variance + rounded(out, False).square() / 3).sqrt(), routed)


def check(found: torch.Tensor, expected: Expected, what: object = "", tokens: torch.Tensor | None = None) -> float:
    """Asserts that bf16 [tokens, hidden] is within the bounds, of `tokens` (a mask) if not of all; returns the largest error over `worst`."""
    keep = torch.ones_like(expected.routed) if tokens is None else tokens
    found, out, worst, spread = (t[keep] for t in (found.double(), expected.out, expected.worst, expected.spread))
    assert torch.isfinite(found).all(), what
    assert not found[~expected.routed[keep]].any(), (what, "tokens that are routed nowhere must give zeros")
    error = (found - out)[expected.routed[keep]]
    if not len(error):
        return 0.0
    worst, spread = worst[expected.routed[keep]], spread[expected.routed[keep]]
    over = (error.abs() / worst).max().item()
    assert over <= 1, (what, f"{over:.3f} times the largest error that roundings explain")
    deviations = (error.square().mean(-1).sqrt() / spread.square().mean(-1).sqrt()).max().item()
    assert deviations <= 3, (what, f"{deviations:.2f} standard deviations of the roundings")
    return over
