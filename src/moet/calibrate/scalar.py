"""Four levels, or any number, times a scale per 32 columns: `sym2`, and the codebooks it is compared with."""

from dataclasses import dataclass
from typing import Literal

import torch

from moet.calibrate.encode import Block
from moet.calibrate.trellis import scale_bytes, scale_values

SYM2_LEVELS = (-4.0, -1.0, 1.0, 4.0)


@dataclass(frozen=True)
class Scalar:
    """`moet.calibrate.encode.Codebook`: the nearest of `levels`, under each of some scales, of which the best one is taken.

    levels  ascending; a code is an index into them
    scale   ue8m0: a power of two (the byte is the exponent + 127), one of five below the group's largest magnitude;
            ue5m3: of `tcq2`; real: float32, its byte is meaningless (a codebook to compare with, no row format)
    """

    levels: tuple[float, ...] = SYM2_LEVELS
    scale: Literal["ue8m0", "ue5m3", "real"] = "ue8m0"
    candidates: int = 16

    def multiplier(self, weight: torch.Tensor) -> torch.Tensor:
        one = torch.ones(len(weight), device=weight.device)
        if self.scale == "ue8m0":
            return one
        deviation = weight.double().square().mean((1, 2)).sqrt().clamp(min=2.0**-100)
        return torch.exp2(torch.log2(deviation).round()).float()

    def block(self, target: torch.Tensor, feedback: torch.Tensor, multiplier: torch.Tensor) -> Block:
        columns, device = target.shape[2], target.device
        levels = torch.tensor(self.levels, device=device)
        middles = (levels[1:] + levels[:-1]) / 2
        tiny = torch.tensor(2.0**-100, device=device)
        tried, scale = self._tried(target.abs().amax(2), multiplier)
        left = target[:, :, None].expand(*scale.shape, columns).clone()
        codes = torch.empty(left.shape, dtype=torch.uint8, device=device)
        values, errors = torch.empty_like(left), torch.empty_like(left)
        for k in range(columns):
            now = left[..., k]
            signed = torch.where(now == 0, tiny.copysign(target[:, :, k, None]), now)  # a zero takes its stored sign
            index = torch.bucketize(signed / scale, middles)
            codes[..., k] = index.to(torch.uint8)
            values[..., k] = levels[index] * scale
            errors[..., k] = (now - values[..., k]) / feedback[:, k, k][:, None, None]
            left[..., k + 1 :] -= errors[..., k, None] * feedback[:, None, None, k, k + 1 :]
        best = errors.square().sum(3).argmin(2, keepdim=True)
        index = best[..., None].expand(*best.shape, columns)
        chosen = (x.gather(2, index)[:, :, 0] for x in (codes, values, errors))
        codes, values, errors = chosen
        return Block(codes, tried.gather(2, best)[..., 0], values, errors)

    def _tried(self, largest: torch.Tensor, multiplier: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale bytes uint8 and scales float32, [G, N, candidates]."""
        top = max(abs(x) for x in self.levels)
        if self.scale == "ue8m0":
            exponent = torch.frexp(largest).exponent - 1
            exponent = torch.where(largest > 0, exponent, torch.full_like(exponent, -126))
            exponent = (exponent[..., None] - torch.arange(5, device=largest.device)).clamp(-126, 127)
            return (exponent + 127).to(torch.uint8), torch.exp2(exponent.float())
        share = torch.linspace(0.35, 1.15, self.candidates, device=largest.device)
        scale = largest[..., None] * share / top
        if self.scale == "real":
            scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
            return torch.zeros_like(scale, dtype=torch.uint8), scale
        tried = scale_bytes(scale, multiplier)
        return tried, scale_values(tried, multiplier)
