"""Where calibration computes, and how much of a layer at a time."""

from dataclasses import dataclass
from typing import Self

import torch

from moet.calibrate.layer import group_size
from moet.checkpoint import Checkpoint
from moet.errors import ConfigError
from moet.models import MoeLayer

BUDGET = {"cpu": 2 << 30, "cuda": 9 << 30}
"""Bytes for the experts that are encoded together. With what a layer's tokens need beside them, 9 GiB fit a 24 GB GPU at
GLM-5.2's sizes."""


@dataclass(frozen=True)
class Device:
    """A device of torch. All is float32 there."""

    name: str

    @classmethod
    def chosen(cls, name: str) -> Self:
        """name: "cpu", "cuda", "cuda:1"..., or "auto". Raises ConfigError if there is no such device."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        try:
            torch.empty(0, device=name)
            known = torch.device(name).type in BUDGET
        except (RuntimeError, AssertionError):
            known = False
        if not known:
            raise ConfigError(f"device: expected cpu, or cuda where torch finds a GPU, found {name}")
        return cls(name)

    @property
    def torch(self) -> torch.device:
        return torch.device(self.name)

    def group(self, checkpoint: Checkpoint, layer: MoeLayer) -> int:
        """How many experts of a layer are encoded together."""
        return group_size(checkpoint.spec.hidden, layer.inter, layer.experts, BUDGET[self.torch.type])
