"""OLMoE 1B-7B."""

from moet.models.family import ModelFamily

OLMOE = ModelFamily(
    architectures=("OlmoeForCausalLM",),
    experts=("model.layers.{layer}.mlp.experts.",),
    router="mlp.gate.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    count=("num_experts", "num_local_experts"),
    inter="intermediate_size",
)
