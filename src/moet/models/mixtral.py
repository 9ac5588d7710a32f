"""Mixtral 8x7B and 8x22B."""

from moet.models.family import W1_W3_W2, ModelFamily

MIXTRAL = ModelFamily(
    architectures=("MixtralForCausalLM",),
    experts=("model.layers.{layer}.block_sparse_moe.experts.",),
    router="block_sparse_moe.gate.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    projections=W1_W3_W2,
    count=("num_local_experts",),
    inter="intermediate_size",
)
