"""DeepSeek-V2, V3 and V3.2: latent attention, shared experts, dense first layers, a multi-token-prediction layer."""

import json
from pathlib import Path

from . import quant_configs
from .attention import indexer, latent
from .truth import Truth
from .writer import COMMON, TOKENS, VOCAB, Writer

# vLLM's CPU kernel for latent attention is compiled for 512 + 64 only, and its rotary embedding is right for yarn only:
# factor 1 leaves the frequencies as they are.
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
YARN = {
    "type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def base_config(
    hidden: int, layers: int, inter: int, experts: int, top_k: int, query_rank: int | None, mtp: int
) -> dict:
    return (
        COMMON
        | TOKENS
        | LATENT
        | {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": inter,
            "n_routed_experts": experts,
            "num_experts_per_tok": top_k,
            "q_lora_rank": query_rank,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": YARN,
            "attention_bias": False,
            "num_nextn_predict_layers": mtp,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
    )


def write_layers(
    w: Writer,
    config: dict,
    scheme: str,
    root: str = "model",
    bias: bool = True,
    mtp_scheme: str | None = None,
    indexed: bool = False,
    split_multipliers: bool = False,
) -> None:
    """All hidden layers and the MTP layers behind them, with their own embedding and head as DeepSeek-V3 has them."""
    hidden, count, inter = w.hidden, config["num_hidden_layers"], config["moe_intermediate_size"]
    for n in range(count + config["num_nextn_predict_layers"]):
        p, mtp = f"{root}.layers.{n}", n >= count
        mine = (mtp_scheme or scheme) if mtp else scheme
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        latent(w, f"{p}.self_attn", config)
        if indexed:
            indexer(w, f"{p}.self_attn.indexer", config)
        if n < config["first_k_dense_replace"]:
            w.mlp(f"{p}.mlp", config["intermediate_size"])
            continue
        w.linear(f"{p}.mlp.gate", config["n_routed_experts"], hidden, scheme="bf16")
        if bias:
            w.plain(f"{p}.mlp.gate.e_score_correction_bias", w.normal(config["n_routed_experts"]), "F32")
        w.experts(
            n,
            f"{p}.mlp.experts",
            config["n_routed_experts"],
            inter,
            mine,
            split_multipliers=split_multipliers,
        )
        w.mlp(f"{p}.mlp.shared_experts", inter * config["n_shared_experts"])
        if mtp:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                w.norm(f"{p}.{name}", hidden)
            w.linear(f"{p}.eh_proj", hidden, 2 * hidden, scheme="bf16")
            for name, source in (
                ("embed_tokens", f"{root}.embed_tokens"),
                ("shared_head.head", root.removesuffix("model") + "lm_head"),
            ):
                w.tensors[f"{p}.{name}.weight"] = w.tensors[f"{source}.weight"]
                w.values[f"{p}.{name}.weight"] = w.values[f"{source}.weight"]


def experts_only(config: dict, root: str = "model") -> list[str]:
    """What modelopt's experts-only recipe leaves alone; a published one leaves out the whole MTP layer."""
    count = config["num_hidden_layers"]
    parts = [
        f"{root}.layers.{n}.{x}"
        for n in range(1, count)
        for x in ("mlp.gate", "mlp.shared_experts*", "self_attn*")
    ]
    last = [f"{root}.layers.{count}*"] if config["num_nextn_predict_layers"] else []
    return [
        f"{root.removesuffix('model')}lm_head",
        f"{root}.embed_tokens",
        f"{root}.layers.0*",
        *parts,
        *last,
    ]


def write_deepseek_v2(
    out: Path,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
) -> Truth:
    """DeepSeek-V2-Lite, BF16: one query projection, softmax routing without a bias, two shared experts in one."""
    config = base_config(hidden, layers, inter, experts, top_k, None, 0) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    }
    w = Writer(seed, hidden)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    write_layers(w, config, "bf16", bias=False)
    return w.save(out, config)


def write_deepseek_v3(
    out: Path,
    seed: int = 0,
    scheme: str = "bf16",
    layers: int = 3,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 16,
    top_k: int = 4,
    mtp: int = 1,
    mtp_scheme: str | None = None,
    hf_quant_only: bool = False,
    split_multipliers: bool = False,
    vocab: int = VOCAB,
    **more: object,
) -> Truth:
    """DeepSeek-V3: "bf16", "fp8_block" (the published one, all linears), or "nvfp4_modelopt" (experts only, MTP layer BF16,
    as nvidia's). `hf_quant_only`: the quantization stands in hf_quant_config.json alone, as in older modelopt exports.
    `more` replaces keys of config.json."""
    config = (
        base_config(hidden, layers, inter, experts, top_k, 128, mtp)
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "vocab_size": vocab,
        }
        | more
    )
    modelopt = scheme in quant_configs.MODELOPT_ALGORITHMS
    w = Writer(seed, hidden, "bf16" if modelopt else scheme, vocab)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    write_layers(
        w,
        config,
        scheme,
        mtp_scheme=mtp_scheme or ("bf16" if modelopt else None),
        split_multipliers=split_multipliers,
    )
    if not modelopt:
        return w.save(out, config | quant_configs.for_scheme(scheme, []))
    truth = w.save(
        out, config if hf_quant_only else config | quant_configs.for_scheme(scheme, experts_only(config))
    )
    (out / "hf_quant_config.json").write_text(
        json.dumps(quant_configs.hf_quant(scheme, experts_only(config)), indent=1)
    )
    return truth


def write_deepseek_v32(
    out: Path,
    seed: int = 0,
    scheme: str = "fp8_block",
    layers: int = 3,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
) -> Truth:
    """DeepSeek-V3.2: V3 with an indexer in every layer; scale_fmt says ue8m0 while the scales are F32."""
    config = base_config(hidden, layers, inter, experts, top_k, 128, 1) | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 64,
    }
    w = Writer(seed, hidden, scheme)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    write_layers(w, config, scheme, indexed=True)
    return w.save(out, config | {"quantization_config": quant_configs.fp8(scale_fmt="ue8m0")})
