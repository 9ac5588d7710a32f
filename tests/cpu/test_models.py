"""Published config.json values in, ModelSpec out; and what a config may not say."""

import pytest

from moet.errors import CheckpointError
from moet.models import FAMILIES, Activation, dense_prefixes, family_of, spec_of

SILU = {"hidden_act": "silu"}
PUBLISHED = {
    "DeepSeek-V3": SILU
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
    },
    "DeepSeek-V4-Flash": SILU
    | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "num_nextn_predict_layers": 1,
        "swiglu_limit": 10.0,
    },
    "DeepSeek-V4.1-Flash": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "text_config": SILU
        | {
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "n_routed_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 2304,
            "num_nextn_predict_layers": 3,
            "dspark_n_routed_experts": 128,
            "swiglu_limit": 10,
        },
    },
    "GLM-5.2": SILU
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    },
    "Kimi-K2.7-Code": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": SILU
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    },
    "Qwen3-30B-A3B": SILU
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss-20b": SILU
    | {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "swiglu_limit": 7.0,
    },
    "Mixtral-8x7B": SILU
    | {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
    },
    "MiniMax-M2.5": SILU
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "hidden_size": 3072,
        "num_hidden_layers": 62,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "intermediate_size": 1536,
        "use_mtp": True,
        "num_mtp_modules": 3,
    },
}

# hidden, top_k, (first and last layer), experts, inter, MTP layers and their experts, limit
EXPECTED = {
    "DeepSeek-V3": (7168, 8, (3, 61), 256, 2048, {61: 256}, None),
    "DeepSeek-V4-Flash": (4096, 6, (0, 43), 256, 2048, {43: 256}, 10.0),
    "DeepSeek-V4.1-Flash": (5120, 6, (0, 42), 384, 2304, {40: 128, 41: 128, 42: 128}, 10.0),
    "GLM-5.2": (6144, 8, (3, 78), 256, 2048, {78: 256}, None),
    "Kimi-K2.7-Code": (7168, 8, (1, 60), 384, 2048, {}, None),
    "Qwen3-30B-A3B": (2048, 8, (0, 47), 128, 768, {}, None),
    "gpt-oss-20b": (2880, 4, (0, 23), 32, 2880, {}, 7.0),
    "Mixtral-8x7B": (4096, 2, (0, 31), 8, 14336, {}, None),
    "MiniMax-M2.5": (3072, 8, (0, 61), 256, 1536, {}, None),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs(model):
    spec = spec_of(PUBLISHED[model])
    hidden, top_k, (first, last), experts, inter, mtp, limit = EXPECTED[model]
    assert (spec.hidden, spec.top_k) == (hidden, top_k)
    assert [layer.index for layer in spec.layers] == list(range(first, last + 1))
    assert {layer.index: layer.experts for layer in spec.mtp_layers} == mtp
    assert all((layer.experts, layer.inter) == (experts, inter) for layer in spec.layers if not layer.mtp)
    assert spec.activation == Activation("swiglu_oai" if model == "gpt-oss-20b" else "swiglu", limit)
    assert spec.layer(last) is spec.layers[-1]


def test_prefixes():
    assert spec_of(PUBLISHED["DeepSeek-V3"]).layers[-1].prefix == "model.layers.61.mlp.experts."
    assert spec_of(PUBLISHED["DeepSeek-V4-Flash"]).layers[-1].prefix == "mtp.0.ffn.experts."
    assert spec_of(PUBLISHED["DeepSeek-V4-Flash"]).layers[5].prefix == "layers.5.ffn.experts."
    assert spec_of(PUBLISHED["Mixtral-8x7B"]).layers[5].prefix == "model.layers.5.block_sparse_moe.experts."


def test_the_checkpoints_spelling_is_used():
    config = PUBLISHED["Kimi-K2.7-Code"]
    assert spec_of(config).layers[0].prefix == "language_model.model.layers.1.mlp.experts."
    assert (
        spec_of(config, ["language_model.layers.1.mlp.experts.0.x"]).layers[0].prefix
        == "language_model.layers.1.mlp.experts."
    )


def test_mtp_layers_that_are_not_in_the_files_are_left_out():
    config = PUBLISHED["DeepSeek-V3"]
    assert not spec_of(config, ["model.layers.3.mlp.experts.0.x"]).mtp_layers
    assert spec_of(config, ["model.layers.61.eh_proj.weight"]).mtp_layers
    v4 = PUBLISHED["DeepSeek-V4-Flash"]
    assert not spec_of(v4, ["layers.0.ffn.experts.0.x"]).mtp_layers
    assert spec_of(v4, ["mtp.0.norm.weight"]).mtp_layers


def test_sparse_steps_and_dense_layers():
    qwen = PUBLISHED["Qwen3-30B-A3B"] | {
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    assert [layer.index for layer in spec_of(qwen).layers] == [1, 5]
    v2 = PUBLISHED["DeepSeek-V3"] | {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
        "num_nextn_predict_layers": 0,
    }
    assert [layer.index for layer in spec_of(v2).layers] == [2, 4]
    glm = PUBLISHED["GLM-5.2"] | {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "num_nextn_predict_layers": 0,
    }
    assert [layer.index for layer in spec_of(glm).layers] == [1]


def test_keys_that_transformers_5_renames():
    config = PUBLISHED["Qwen3-30B-A3B"] | {"num_experts": None, "num_local_experts": 64}
    assert spec_of(config).layers[0].experts == 64


@pytest.mark.parametrize(
    "model, change, words",
    [
        (
            "Qwen3-30B-A3B",
            {"architectures": ["Llama4ForConditionalGeneration"]},
            ("Llama4", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "docs/models.md"),
        ),
        ("Qwen3-30B-A3B", {"architectures": []}, ("architectures",)),
        ("Qwen3-30B-A3B", {"architectures": None}, ("architectures",)),
        ("Qwen3-30B-A3B", {"hidden_act": "gelu"}, ("hidden_act", "silu", "gelu")),
        ("Qwen3-30B-A3B", {"swiglu_limit": 7.0}, ("swiglu_limit", "7.0", "does not clamp")),
        ("gpt-oss-20b", {"swiglu_limit": -1}, ("swiglu_limit", "-1")),
        ("gpt-oss-20b", {"swiglu_limit": "7"}, ("swiglu_limit",)),
        ("gpt-oss-20b", {"swiglu_limit": float("nan")}, ("swiglu_limit",)),
        ("DeepSeek-V3", {"n_routed_experts": 0}, ("n_routed_experts", "0")),
        ("DeepSeek-V3", {"n_routed_experts": None}, ("n_routed_experts", "None")),
        ("DeepSeek-V3", {"n_routed_experts": True}, ("n_routed_experts", "True")),
        ("DeepSeek-V3", {"hidden_size": 7168.0}, ("hidden_size",)),
        ("DeepSeek-V3", {"num_experts_per_tok": 300}, ("num_experts_per_tok", "256", "300")),
        (
            "DeepSeek-V3",
            {"first_k_dense_replace": 99, "num_nextn_predict_layers": 0},
            ("routed experts", "none"),
        ),
        ("Kimi-K2.7-Code", {"text_config": None}, ("text_config",)),
    ],
)
def test_refusals(model, change, words):
    with pytest.raises(CheckpointError) as caught:
        spec_of(PUBLISHED[model] | change)
    for word in (*words, "expected", "found"):
        assert word in str(caught.value)


def test_an_absent_limit_is_the_familys_own():
    v4 = {k: v for k, v in PUBLISHED["DeepSeek-V4-Flash"].items() if k not in ("swiglu_limit", "hidden_act")}
    assert spec_of(v4).activation == Activation("swiglu", 10.0)
    assert spec_of(PUBLISHED["DeepSeek-V4-Flash"] | {"swiglu_limit": None}).activation == Activation(
        "swiglu", None
    )


def test_dense_prefixes_stop_at_the_last_layer():
    config = PUBLISHED["DeepSeek-V3"]
    prefixes = dense_prefixes(family_of(config)[1], config)
    assert "model.layers.61." in prefixes and "model.layers.62." not in prefixes
    v4 = PUBLISHED["DeepSeek-V4-Flash"]
    prefixes = dense_prefixes(family_of(v4)[1], v4)
    assert {"layers.42.", "mtp.0.", "embed."} <= set(prefixes) and not {"layers.43.", "mtp.1."} & set(
        prefixes
    )


def test_no_architecture_twice():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.architectures[0])
def test_declarations_are_whole(family):
    assert all(pattern.count("{layer}") == 1 and pattern.endswith(".") for pattern in family.experts)
    assert not family.mtp_experts or family.mtp_experts.count("{mtp}") == 1
    assert not (family.mtp_experts and not family.mtp_count)
    p = family.projections
    assert len({p.gate, p.up, p.down, p.fused}) == 4
    for pattern in family.experts:
        assert pattern.startswith(tuple(d.split("{")[0] for d in family.dense if "{layer}" in d))
