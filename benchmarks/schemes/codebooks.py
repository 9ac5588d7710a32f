"""The schemes of the table: what a pack can hold, and what it is compared with."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moet.calibrate.encode import Codes, encode_matrix
from moet.calibrate.scalar import Scalar
from moet.calibrate.trellis import Trellis
from moet.numerics import E2M1

Encode = Callable[..., Codes]


@dataclass(frozen=True)
class Scheme:
    """bits: a weight, scales included. calibrated: `encode` is given statistics of calibration text.
    down: for the second matrix, where it is encoded another way. packed: its name in a pack, "" if no row format has it."""

    name: str
    what: str
    bits: float
    encode: Encode
    calibrated: bool
    down: Encode | None = None
    packed: str = ""


def alone(encode: Encode) -> Encode:
    """Error feedback on the weights themselves: what is wanted of the outputs is not looked at."""

    def without(weight: torch.Tensor, hessian=None, wanted=None, ridge=0.0) -> Codes:
        return encode(weight, hessian)

    return without


def values_only(values: torch.Tensor) -> Codes:
    """A codebook without a row format."""
    count, rows, columns = values.shape
    empty = torch.zeros(count, rows, -(-columns // 32), dtype=torch.uint8, device=values.device)
    return Codes(torch.zeros_like(values, dtype=torch.uint8), empty, torch.ones(count, device=values.device), values)


def fp4_units(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 with the power of two nearest to max / 6: E2M1 values [G, N, K] and 2^e [G, N, K]. Ties between E2M1 values go to the smaller one."""
    count, rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 32)).reshape(count, rows, -1, 32)
    exponent = torch.round(torch.log2(padded.abs().amax(3, keepdim=True) / 6 + 1e-30)).clamp(-126, 127)
    unit = torch.exp2(exponent).expand_as(padded).reshape(count, rows, -1)[..., :columns]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    scaled = weight / unit
    return levels[torch.bucketize(scaled.abs(), middles)].copysign(scaled), unit


def fp4_remap(weight: torch.Tensor, *_) -> Codes:
    """MXFP4's own exponent, magnitudes up to 2 to 1 and the others to 4: no search."""
    value, unit = fp4_units(weight)
    return values_only(torch.where(value.abs() > 2, 4.0, 1.0).copysign(value) * unit)


@functools.cache
def _grid() -> tuple[torch.Tensor, torch.Tensor]:
    """The 15 values of E2M1, and all sets of four of them [1365, 4], ascending."""
    grid = torch.tensor(sorted({float(v) for v in E2M1}))
    return grid, torch.tensor(list(itertools.combinations(grid.tolist(), 4)))


def asymmetric(weight: torch.Tensor, *_) -> Codes:
    """The four E2M1 values of least squared error over a matrix's own histogram, symmetric or not; MXFP4's exponent."""
    grid, sets = _grid()
    value, unit = fp4_units(weight)
    out = torch.empty_like(weight)
    for g in range(len(weight)):
        v = value[g].cpu()
        histogram = (v[..., None] == grid).sum((0, 1)).double()
        distance = (grid[None, :, None] - sets[:, None]).square().amin(2).double()
        best = sets[(distance * histogram).sum(1).argmin()].to(weight.device)
        nearest = (value[g][..., None] - best).abs().argmin(-1)
        out[g] = best[nearest] * unit[g]
    return values_only(out)


def rotated(encode: Encode) -> Encode:
    """Every 32 columns turned by a Hadamard matrix, which a server would have to do to the activations."""
    h = torch.ones(1, 1)
    while len(h) < 32:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    h = h / math.sqrt(32)

    def turned(weight: torch.Tensor, hessian=None, wanted=None, ridge=0.0) -> Codes:
        columns = weight.shape[2]
        turn = torch.block_diag(*[h] * (columns // 32)).to(weight.device)
        assert len(turn) == columns, f"rotation: expected a multiple of 32 columns, found {columns}"
        turned_hessian = None if hessian is None else turn.T @ hessian @ turn
        codes = encode(weight @ turn, turned_hessian, None if wanted is None else wanted @ turn, ridge)
        return values_only(codes.values @ turn.T)

    return turned


def uniform(levels: int) -> tuple[float, ...]:
    """Evenly spaced, symmetric."""
    return tuple(float(2 * i - levels + 1) for i in range(levels))


def book(codebook) -> Encode:
    return functools.partial(encode_matrix, codebook)


SYM2, TCQ2 = book(Scalar()), book(Trellis())
FINE = book(Scalar((-3.5, -1.0, 1.0, 3.5), "ue5m3"))
TERNARY, SIX = book(Scalar(uniform(3), "ue5m3")), book(Scalar(uniform(6), "ue5m3"))

SCHEMES = (
    Scheme("asymmetric", "four E2M1 values of least error a matrix, exponent of MXFP4", 2.25, asymmetric, False),
    Scheme("fp4-remap", "{-4, -1, 1, 4}, exponent of MXFP4 (the incumbent)", 2.25, fp4_remap, False),
    Scheme("sym2-rtn", "{-4, -1, 1, 4}, best power of two", 2.25, SYM2, False, packed="sym2-rtn"),
    Scheme("fine-rtn", "{-3.5, -1, 1, 3.5}, UE5M3 scale", 2.25, FINE, False),
    Scheme("tcq2-rtn", "trellis, UE5M3 scale", 2.25, TCQ2, False, packed="tcq2-rtn"),
    Scheme("sym2-feedback", "sym2, error feedback alone", 2.25, alone(SYM2), True),
    Scheme("fine-feedback", "fine, error feedback alone", 2.25, alone(FINE), True),
    Scheme("tcq2-feedback", "trellis, error feedback alone", 2.25, alone(TCQ2), True),
    Scheme("sym2-gptq", "sym2, error feedback towards the full network", 2.25, SYM2, True, packed="sym2-gptq"),
    Scheme("fine-gptq", "fine, error feedback towards the full network", 2.25, FINE, True),
    Scheme("tcq2-gptq", "trellis, error feedback towards the full network", 2.25, TCQ2, True, packed="tcq2-gptq"),
    Scheme("3-and-6-gptq", "w13 in 3 levels, w2 in 6, radix-packed", (2 * 1.6 + 2.6) / 3 + 0.25, TERNARY, True, SIX),
    Scheme("rotated-gptq", "tcq2-gptq, every 32 columns turned by a Hadamard matrix", 2.25, rotated(TCQ2), True),
)
