"""Collects a checkpoint's tensors while a family's module names them."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .safetensors_file import write_folder
from .schemes import FORMATS, SCHEMES, Raw, raw
from .tokenizer import write_tokenizer
from .truth import Expert, Site, Truth

VOCAB = 1024
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Writer:
    """`dense`: scheme of the linear layers outside the routed experts. Weights are normal with deviation 1/sqrt(K), so that
    activations keep their size; the experts' down projections get 4 times that, so that a wrong expert shows in the logits."""

    seed: int
    hidden: int
    dense: str = "bf16"
    vocab: int = VOCAB
    tensors: dict[str, Raw] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    sites: dict[int, Site] = field(default_factory=dict)
    known: dict[tuple[int, int], Expert] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def normal(self, *shape: int, gain: float = 1.0) -> np.ndarray:
        """float32 normal values with deviation gain / sqrt(last dimension)."""
        return self.random.standard_normal(shape, np.float32) * np.float32(gain / shape[-1] ** 0.5)

    def plain(self, name: str, values: np.ndarray, dtype: str = "BF16") -> None:
        """A tensor that is never quantized."""
        tensor = raw(dtype, values)
        self.tensors[name] = tensor
        self.values[name] = (
            tensor.data if dtype != "BF16" else (tensor.data.astype(np.uint32) << 16).view(np.float32)
        )

    def linear(self, name: str, rows: int, cols: int, gain: float = 1.0, scheme: str | None = None) -> None:
        """A linear layer outside the routed experts: the checkpoint's scheme for those, or `scheme`."""
        stored = SCHEMES[scheme or self.dense](name, self.normal(rows, cols, gain=gain))
        self.tensors |= stored.tensors
        self.values[f"{name}.weight"] = stored.value

    def norm(self, name: str, size: int) -> None:
        self.plain(f"{name}.weight", 1 + self.normal(size, gain=0.5))

    def mlp(
        self, name: str, inter: int, names: tuple[str, str, str] = NAMES, scheme: str | None = None
    ) -> None:
        """A dense gated MLP, or the shared experts."""
        self.linear(f"{name}.{names[0]}", inter, self.hidden, scheme=scheme)
        self.linear(f"{name}.{names[1]}", inter, self.hidden, scheme=scheme)
        self.linear(f"{name}.{names[2]}", self.hidden, inter, scheme=scheme)

    def experts(
        self,
        layer: int,
        prefix: str,
        count: int,
        inter: int,
        scheme: str,
        names: tuple[str, str, str] = NAMES,
        split_multipliers: bool = False,
    ) -> None:
        """Routed experts, one tensor group each. NVFP4: gate and up share their multiplier, as modelopt makes them, unless
        `split_multipliers`. Expert 0 gets a zero block and some signed zeros, which rounding alone
        makes rarely; few, since tools give exact zeros one sign and a 2-bit zero has to take a side."""
        self.sites[layer] = Site(prefix, names, FORMATS[scheme])
        for e in range(count):
            gate, up = self.normal(inter, self.hidden), self.normal(inter, self.hidden)
            down = self.normal(self.hidden, inter, gain=4)
            if e == 0:
                gate[0, :32], up[1, :16], down[0, ::7] = 0, -0.0, -0.0
            shared = None if split_multipliers else float(max(np.abs(gate).max(), np.abs(up).max()))
            stored = [
                SCHEMES[scheme](f"{prefix}.{e}.{name}", matrix, amax=amax)
                for name, matrix, amax in zip(names, (gate, up, down), (shared, shared, None), strict=True)
            ]
            for one in stored:
                self.tensors |= one.tensors
            self.known[layer, e] = Expert(*(one.value for one in stored))

    def embeddings(self, embed: str, norm: str, head: str) -> None:
        """The logits' spread is about 3, so that greedy tokens are well apart in float32 arithmetic."""
        self.plain(f"{embed}.weight", self.normal(self.vocab, self.hidden, gain=self.hidden**0.5))
        self.norm(norm, self.hidden)
        self.plain(f"{head}.weight", self.normal(self.vocab, self.hidden, gain=3))

    def save(self, out: Path, config: dict, shards: int = 2) -> Truth:
        """Writes the folder. The tokenizer knows VOCAB tokens; a model with another vocabulary gets none."""
        write_folder(out, self.tensors, config, shards)
        if self.vocab == VOCAB:
            write_tokenizer(out, VOCAB)
        return Truth(out, config, self.sites, self.known, self.values)
