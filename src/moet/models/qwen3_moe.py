"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder). transformers 5 renames `num_experts` to `num_local_experts` when it
saves."""

from moet.models.family import ModelFamily
from moet.models.rules import every_step

QWEN3_MOE = ModelFamily(
    architectures=("Qwen3MoeForCausalLM",),
    experts=("model.layers.{layer}.mlp.experts.",),
    router="mlp.gate.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    has_experts=every_step,
    count=("num_experts", "num_local_experts"),
)
