"""A checkpoint with random weights at a real model's dimensions, of which no byte is on a disk: for timing one layer."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import transformers
from encode import random_matrix

from moet.checkpoint import ExpertWeights, TensorInfo
from moet.forward.decoder import build
from moet.layout import RowGeometry
from moet.layout.planes import PROJECTIONS
from moet.models import spec_of
from moet.numerics import narrow_bf16

MODELS = {
    "glm-5.2": ("GlmMoeDsaForCausalLM", "fp8", 3),
    "v4-flash": ("DeepseekV4ForCausalLM", "mxfp4", 3),
}
"""Architecture, whose config in transformers has this model's sizes as defaults; format of the experts; the layer to time:
the first one whose router is the usual one."""
DTYPES = {"bfloat16": "BF16", "float32": "F32", "int64": "I64"}
DISTINCT = 4
"""Experts that differ; the others repeat them. Nothing that is timed depends on the values."""


class SyntheticCheckpoint:
    """What `moet.forward.Decoder` and calibration ask of a `moet.checkpoint.Checkpoint`. scale: divides hidden size, expert
    width and number of experts, to try it on a small machine."""

    def __init__(self, model: str, scale: int = 1) -> None:
        architecture, self.format, self.layer = MODELS[model]
        config_class = getattr(transformers, architecture).config_class
        sizes = config_class()
        # The embedding is not timed: a small vocabulary saves its memory.
        config = config_class(
            num_hidden_layers=self.layer + 1,
            vocab_size=1024,
            hidden_size=sizes.hidden_size // scale,
            moe_intermediate_size=sizes.moe_intermediate_size // scale,
            n_routed_experts=sizes.num_local_experts // scale,
        )
        self.config = config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"}
        self.config["n_routed_experts"] = config.num_local_experts
        self.config["num_nextn_predict_layers"] = 0
        self.root, self.spec = Path(f"random {model}"), spec_of(self.config)
        meta = build(self).state_dict()
        self._dense = {name: tensor for name, tensor in meta.items() if ".mlp.experts." not in name}
        random = np.random.default_rng(0)
        geometry = RowGeometry(self.format, self.spec.hidden, self.spec.layers[-1].inter, False)
        self._experts = [
            ExpertWeights(self.layer, e, *(random_matrix(random, geometry, name) for name in PROJECTIONS))
            for e in range(DISTINCT)
        ]
        self.dense_shards = ("none",)

    @property
    def dense(self) -> list[str]:
        return list(self._dense)

    @property
    def other_weights(self) -> int:
        """Weights of the timed layer that are no routed experts."""
        return sum(t.numel() for name, t in self._dense.items() if f".layers.{self.layer}." in name)

    def shard_of(self, name: str) -> str:
        return "none"

    def tensor_info(self, name: str) -> TensorInfo:
        tensor = self._dense[name]
        dtype = "I64" if not tensor.is_floating_point() else "BF16" if tensor.dim() > 1 else "F32"
        size = {"I64": 8, "BF16": 2, "F32": 4}[dtype]
        return TensorInfo(name, dtype, tuple(tensor.shape), self.root, 0, size * tensor.numel())

    def read(self, name: str) -> np.ndarray:
        """Normal matrices of deviation 1 / sqrt(columns); vectors are 1 if they belong to norms, else 0."""
        info = self.tensor_info(name)
        if info.dtype == "BF16":
            random = np.random.default_rng(len(name))
            values = random.standard_normal(info.shape, np.float32) / np.float32(info.shape[-1] ** 0.5)
            return narrow_bf16(values).view(np.uint8).reshape(-1)
        dtype = np.int64 if info.dtype == "I64" else np.float32
        return np.full(info.shape, "norm" in name, dtype).view(np.uint8).reshape(-1)

    def expert(self, layer: int, expert: int) -> ExpertWeights:
        return dataclasses.replace(self._experts[expert % DISTINCT], layer=layer, expert=expert)

    def experts(self, layer: int) -> Iterator[ExpertWeights]:
        return (self.expert(layer, e) for e in range(self.spec.layers[-1].experts))
