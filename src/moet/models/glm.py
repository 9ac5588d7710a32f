"""GLM-4.5 to 4.7 (Glm4Moe) and GLM-5, 5.1, 5.2 (GlmMoeDsa). MTP is the layer after the last."""

from moet.models.family import ModelFamily
from moet.models.rules import after_first_dense

GLM = ModelFamily(
    architectures=("Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"),
    experts=("model.layers.{layer}.mlp.experts.",),
    router="mlp.gate.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    has_experts=after_first_dense,
    mtp_count="num_nextn_predict_layers",
)
