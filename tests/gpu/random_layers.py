"""Random cases of the expert MLP on a GPU: geometries, routings, values; each from a seed, and printed whole where it fails."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from layout_cases import random_expert

from moet.kernels.expert_mlp.launches import PAIRS
from moet.layout import RowGeometry, pack_row
from moet.layout.planes import PROJECTIONS
from moet.models import Activation
from moet.moe.device import DeviceRuntime

ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation("swiglu", 7.0), "oai": Activation("swiglu_oai", 7.0, 1.702)}
ROUTINGS = ("uniform", "one expert", "two experts", "twice", "holes", "out of range", "masked")
VALUES = ("normal", "zeros", "outlier", "subnormal", "mixed", "one column", "nan", "inf")
STRAY = (-1, -7, -(1 << 31), (1 << 31) - 1, 1 << 20)
"""Numbers of no expert; one past the last is another."""


def pairs_of_large(runtime: DeviceRuntime, format: str, tokens: int, experts: int, top_k: int, scan: bool) -> int:
    """Pairs of an expert from which on the large kernels compute it."""
    return PAIRS[runtime._kernels[format].size_of(tokens, experts, top_k, scan)]


@dataclass(frozen=True)
class Case:
    """inner, outer: gate and up are 2^inner of the usual and x is 2^-inner; down is 2^outer. coverage: share of the rows that slots hold, 0 for the least."""

    format: str
    seed: int
    hidden: int
    inter: int
    biased: bool
    activation: str
    experts: int
    top_k: int
    tokens: int
    routing: str
    values: str
    inner: int
    outer: int
    rank: int
    world: int
    coverage: float

    @property
    def geometry(self) -> RowGeometry:
        return RowGeometry(self.format, self.hidden, self.inter, self.biased)


def draw(format: str, seed: int, small: bool) -> Case:
    """small: what the emulator computes in a second."""
    rng = np.random.default_rng([seed, sum(map(ord, format))])
    most, group = (168 if small else 520), {"mxfp4": 32, "nvfp4": 16}.get(format, 8)
    size = lambda step, most: int(step * rng.integers(1, most // step + 1))
    # Long sums, so that each warp has several chunks one after the other: of gate and up, of down, or of both on a GPU.
    long = (seed % 4 == 3, seed % 8 >= 6)
    hidden = size(group, most) + (960 if long[0] else 0)
    inter = size(group if format in ("mxfp4", "nvfp4") else 1, most // 4 if small and long[0] else most) + (960 if long[1] and not (small and long[0]) else 0)
    world = int(rng.choice([1, 1, 2, 3, 4, 8]))
    world = min(world, -(-inter // 32))
    counts = (1, 2, 3, 7, 8, 9, 11) if small else (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 129, 300)
    return Case(
        format, seed, hidden, inter, bool(rng.integers(2)), str(rng.choice(list(ACTIVATIONS))), experts=int(rng.integers(1, 5 if small and any(long) else 9 if small else 25)),
        top_k=int(rng.integers(1, 5 if small else 9)), tokens=int(rng.choice(counts)), routing=ROUTINGS[seed % len(ROUTINGS)], values=str(rng.choice(VALUES)),
        inner=int(rng.choice([0, 0, -30, 30])), outer=int(rng.choice([0, 0, -40, 40])), rank=int(rng.integers(world)), world=world,
        coverage=float(rng.choice([0, 0.5, 1])),
    )  # fmt: skip


def scaled(matrix, exponent: int):
    """The matrix times 2^exponent, by its scales, or by bf16's exponents."""
    if exponent == 0:
        return matrix
    if matrix.format in ("sym2", "mxfp4"):
        return dataclasses.replace(matrix, scales=(matrix.scales.astype(np.int32) + exponent).astype(np.uint8))
    if matrix.format in ("tcq2", "nvfp4"):
        return dataclasses.replace(matrix, multiplier=matrix.multiplier * 2.0**exponent)
    if matrix.format == "bf16":
        values = (matrix.codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32) * np.float32(2.0**exponent)
        return dataclasses.replace(matrix, codes=(values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return dataclasses.replace(matrix, scales=matrix.scales * np.float32(2.0**exponent))


def with_least_scales(matrix, rng: np.random.Generator):
    """Some scales are the format's least numbers: zero, or 2^-127, which may count as zero; of tcq2 bytes below 16, 2^-15 to 2^-13."""
    if matrix.scales is None:
        return matrix
    least = rng.integers(0, 16, matrix.scales.shape) if matrix.format == "tcq2" else 0
    return dataclasses.replace(matrix, scales=np.where(rng.random(matrix.scales.shape) < 0.03, least, matrix.scales).astype(matrix.scales.dtype))


def rows(case: Case) -> np.ndarray:
    """uint8 [experts, row_bytes]."""
    out, rng = np.empty((case.experts, case.geometry.row_bytes), np.uint8), np.random.default_rng([case.seed, 2])
    for e, row in enumerate(out):
        expert = random_expert(case.geometry, 100 * case.seed + e)
        matrices = (scaled(getattr(expert, name), case.outer if name == "down" else case.inner) for name in PROJECTIONS)
        pack_row(case.geometry, *(with_least_scales(m, rng) for m in matrices), row)
    return out


@dataclass(frozen=True)
class Batch:
    """alone: [tokens], rows whose result is checked for what it does to others only: they hold NaN or infinity."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    kv_slots: torch.Tensor | None
    alone: torch.Tensor


def batch(case: Case, device: str) -> Batch:
    rng = np.random.default_rng([case.seed, 1])
    tokens, hidden = case.tokens, case.hidden
    x = rng.standard_normal((tokens, hidden))
    x[:, rng.integers(0, hidden, max(1, hidden // 50))] *= 20   # as hidden states have them
    if case.values == "zeros":
        x[rng.random((tokens, hidden)) < 0.7] = 0
        x[:, : hidden // 2] = 0
        x[rng.integers(tokens)] = 0
    elif case.values == "outlier":
        x[:, rng.integers(hidden)] *= 2.0**15
    elif case.values == "subnormal":
        x[rng.random(tokens) < 0.6] *= 2.0 ** (-133 + case.inner)
    elif case.values == "mixed":
        x *= 2.0 ** rng.uniform(-20, 20, x.shape)
    elif case.values == "one column":
        x[:, np.arange(hidden) != rng.integers(hidden)] = 0
    x *= 2.0**-case.inner
    alone = np.zeros(tokens, bool)
    if case.values in ("nan", "inf"):
        alone[rng.integers(tokens)] = True
        x[alone, rng.integers(hidden)] = np.nan if case.values == "nan" else rng.choice([-np.inf, np.inf])
    ids = rng.integers(0, case.experts, (tokens, case.top_k))
    if case.routing == "uniform" and case.top_k <= case.experts:
        ids = np.argsort(rng.random((tokens, case.experts)), axis=1)[:, : case.top_k]
    elif case.routing == "one expert":
        ids[:] = ids[0, 0]
    elif case.routing == "two experts":
        ids %= 2
    elif case.routing == "twice":
        ids[:, -1] = ids[:, 0]
    elif case.routing in ("holes", "out of range"):
        stray = [-1] if case.routing == "holes" else [*STRAY, case.experts]
        ids = np.where(rng.random(ids.shape) < 0.4, rng.choice(stray, ids.shape), ids)
        ids[rng.integers(tokens)] = -1
    kv_slots = None
    if case.routing == "masked":
        masked = rng.random(tokens) < 0.5
        kv_slots = torch.from_numpy(np.where(masked, -1, np.arange(tokens))).to(device)
        x[masked] = np.nan
        ids[masked, 0] = 1 << 30
    weights = rng.uniform(-0.2, 1, (tokens, case.top_k)).astype(np.float32)
    to = lambda a, dtype: torch.from_numpy(a).to(dtype).to(device).contiguous()
    return Batch(to(x, torch.bfloat16), to(weights, torch.float32), to(ids.astype(np.int32), torch.int32), kv_slots, to(alone, torch.bool))
