"""Kimi K2.5 to K2.7: DeepSeek-V3's text model inside a vision model. Early K2.5-NVFP4 files leave out the
inner "model."."""

from moet.models.family import ModelFamily
from moet.models.rules import after_first_dense

KIMI = ModelFamily(
    architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    experts=(
        "language_model.model.layers.{layer}.mlp.experts.",
        "language_model.layers.{layer}.mlp.experts.",
    ),
    router="mlp.gate.weight",
    dense=(
        "language_model.model.layers.{layer}.",
        "language_model.model.embed_tokens.",
        "language_model.model.norm.",
        "language_model.layers.{layer}.",
        "language_model.embed_tokens.",
        "language_model.norm.",
        "language_model.lm_head.",
        "vision_tower.",
        "mm_projector.",
    ),
    text="text_config",
    has_experts=after_first_dense,
    mtp_count="num_nextn_predict_layers",
)
