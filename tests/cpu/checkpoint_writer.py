"""A tiny Qwen3-MoE checkpoint of any number format that a test may damage before it is written."""

from pathlib import Path

import numpy as np

from tests.generators.safetensors_file import write_folder
from tests.generators.schemes import Raw
from tests.generators.truth import Truth
from tests.generators.writer import Writer

PREFIX = "model.layers.{}.mlp.experts."


class Tiny:
    """Change `tensors` and `config`, then `save`. Layers 0..layers-1 all have experts; one dense tensor a
    layer besides the router."""

    def __init__(
        self,
        scheme: str | tuple[str, ...] = "bf16",
        hidden: int = 64,
        inter: int = 96,
        experts: int = 3,
        seed: int = 0,
        **options,
    ):
        schemes = (scheme,) if isinstance(scheme, str) else scheme
        self.writer = Writer(seed, hidden)
        self.config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": hidden,
            "num_hidden_layers": len(schemes),
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": inter,
        }
        for n, one in enumerate(schemes):
            self.writer.plain(f"model.layers.{n}.mlp.gate.weight", self.writer.normal(experts, hidden))
            self.writer.plain(f"model.layers.{n}.input_layernorm.weight", self.writer.normal(hidden))
            self.writer.experts(n, PREFIX.format(n)[:-1], experts, inter, one, **options)
        self.writer.plain("model.embed_tokens.weight", self.writer.normal(8, hidden))
        self.writer.plain("lm_head.weight", self.writer.normal(8, hidden))

    @property
    def tensors(self) -> dict[str, Raw]:
        return self.writer.tensors

    def name(self, expert: int, tail: str, layer: int = 0) -> str:
        """Full name of an expert's tensor: name(1, "up_proj.weight")."""
        return f"{PREFIX.format(layer)}{expert}.{tail}"

    def poke(self, name: str, index: int, value: float) -> None:
        """Overwrites one item (by its raw number) of a tensor."""
        old = self.tensors[name]
        data = old.data.copy()
        data.reshape(-1)[index] = value
        self.tensors[name] = Raw(old.dtype, data)

    def save(self, out: Path, shards: int = 1) -> Truth:
        write_folder(out, self.tensors, self.config, shards)
        w = self.writer
        return Truth(out, self.config, w.sites, w.known, w.values)


def same(matrix: np.ndarray, expected: np.ndarray) -> None:
    """Equal numbers and equal signs of zeros: both sides are exact in float64."""
    assert matrix.shape == expected.shape
    assert np.array_equal(matrix, expected)
    assert np.array_equal(np.signbit(matrix), np.signbit(expected))
