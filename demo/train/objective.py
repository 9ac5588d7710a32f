"""What training minimises, and the schedules that change over the run; `progress` runs from 0 to 1."""

import math

import torch
import torch.nn.functional as F
from config import ModelConfig
from model import Model

MTP_WEIGHT = 0.3
QUIET_END = 0.9  # no more balancing after this share of the time, so that the biases settle
SPARSE, CROWDED, BIAS_RATE = 0.3, 2.5, 1e-3  # an expert outside this band of the mean load is moved
TWO_BIT_START, ALL, MIXED = 0.2, 0.45, 0.2  # shares of the steps with every expert / a random half rounded


def losses(model: Model, tokens: torch.Tensor, two_bit: torch.Tensor):
    """tokens [B, S + 2] -> (loss, next-token loss, token-after-next loss, loads [moe layers, E])

    The MTP head learns the text and, in equal parts, what the model itself will say: a draft
    is accepted when it equals the model's choice, not the text's.
    """
    hidden, mtp, loads = model(tokens[:, :-1], two_bit)
    logits, ahead = model.lm_head(hidden).float(), model.lm_head(mtp).float()
    main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
    text = F.cross_entropy(ahead.flatten(0, 1), tokens[:, 2:].flatten())
    teacher = logits[:, 1:].detach().softmax(-1)
    own = -(teacher * ahead[:, :-1].log_softmax(-1)).sum(-1).mean()
    return main + MTP_WEIGHT * 0.5 * (text + own), main.detach(), text.detach(), loads


def rate(progress: float) -> float:
    """Learning-rate factor: short warm-up, flat until a quarter, cosine to 2 %."""
    if progress < 0.01:
        return progress / 0.01
    return 1.0 if progress < 0.25 else 0.02 + 0.49 * (1 + math.cos(math.pi * (progress - 0.25) / 0.75))


def rounding(c: ModelConfig, progress: float, generator: torch.Generator) -> torch.Tensor:
    """Which experts [moe layers, 2, E] are rounded to two bits in this step."""
    shape, draw = (c.moe_layers, 2, c.experts), torch.rand((), generator=generator).item()
    if progress < TWO_BIT_START or draw > ALL + MIXED:
        return torch.zeros(shape)
    return torch.ones(shape) if draw < ALL else torch.randint(0, 2, shape, generator=generator).float()


@torch.no_grad()
def balance(model: Model, loads: torch.Tensor, progress: float) -> None:
    """Moves the choice biases of experts whose load left the band; within it, experts may specialise."""
    if progress > QUIET_END:
        return
    for moe, load in zip(model.moes(), loads):
        relative = load / load.mean()
        moe.gate.e_score_correction_bias += BIAS_RATE * (
            (relative < SPARSE).float() - (relative > CROWDED).float()
        )
