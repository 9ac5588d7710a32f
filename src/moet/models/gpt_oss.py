"""gpt-oss 20b and 120b: all experts of a layer in one tensor, gate and up rows interleaved, biases, and an
activation of its own."""

from moet.models.family import ActivationRule, ModelFamily, Projections

GPT_OSS = ModelFamily(
    architectures=("GptOssForCausalLM",),
    experts=("model.layers.{layer}.mlp.experts.",),
    router="mlp.router.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    projections=Projections(
        "gate_proj", "up_proj", "down_proj", fused="gate_up_proj", interleaved=True, transposed=True
    ),
    count=("num_local_experts",),
    inter="intermediate_size",
    activation=ActivationRule(kind="swiglu_oai", limit_key="swiglu_limit", default_limit=7.0),
)
