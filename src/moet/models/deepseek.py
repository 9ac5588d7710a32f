"""DeepSeek V2, V3, V3.1, R1, V3.2, and text-only Kimi K2, which has their architecture. MTP is the layer
after the last."""

from moet.models.family import ModelFamily
from moet.models.rules import after_first_dense

DEEPSEEK = ModelFamily(
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
    experts=("model.layers.{layer}.mlp.experts.",),
    router="mlp.gate.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    has_experts=after_first_dense,
    mtp_count="num_nextn_predict_layers",
)
