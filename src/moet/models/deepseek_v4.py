"""DeepSeek V4 and V4.1. Names have no "model." in front; every layer has routed experts; MTP (V4) and DSpark
(V4.1) stages are `mtp.K.`."""

from dataclasses import replace

from moet.models.family import W1_W3_W2, ActivationRule, ModelFamily

DEEPSEEK_V4 = ModelFamily(
    architectures=("DeepseekV4ForCausalLM",),
    experts=("layers.{layer}.ffn.experts.",),
    mtp_experts="mtp.{mtp}.ffn.experts.",
    router="ffn.gate.weight",
    dense=(
        "layers.{layer}.",
        "mtp.{mtp}.",
        "embed.",
        "norm.",
        "head.",
        "hc_head_",
        "vision.",
        "aligner.",
        "image_start",
        "image_end",
        "image_newline",
    ),
    projections=W1_W3_W2,
    mtp_count="num_nextn_predict_layers",
    mtp_width="dspark_n_routed_experts",
    activation=ActivationRule(limit_key="swiglu_limit", default_limit=10.0),
)

DEEPSEEK_V41 = replace(DEEPSEEK_V4, architectures=("DeepseekV41ForCausalLM",), text="text_config")
