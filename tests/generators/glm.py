"""GLM-4.5 (grouped-query attention) and GLM-5, 5.2 (latent attention with an indexer shared by several layers)."""

from pathlib import Path

from . import quant_configs
from .attention import grouped, indexer, latent
from .deepseek import LATENT
from .truth import Truth
from .writer import COMMON, TOKENS, VOCAB, Writer


def _moe(w: Writer, config: dict, n: int, scheme: str) -> None:
    p, experts = f"model.layers.{n}", config["n_routed_experts"]
    w.linear(f"{p}.mlp.gate", experts, w.hidden, scheme="bf16")
    w.plain(f"{p}.mlp.gate.e_score_correction_bias", w.normal(experts), "F32")
    w.experts(n, f"{p}.mlp.experts", experts, config["moe_intermediate_size"], scheme)
    w.mlp(f"{p}.mlp.shared_experts", config["moe_intermediate_size"])


def _mtp(w: Writer, p: str) -> None:
    for name in ("enorm", "hnorm", "shared_head.norm"):
        w.norm(f"{p}.{name}", w.hidden)
    w.linear(f"{p}.eh_proj", w.hidden, 2 * w.hidden, scheme="bf16")


def write_glm4_moe(
    out: Path,
    seed: int = 0,
    scheme: str = "bf16",
    layers: int = 3,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    mtp: bool = True,
) -> Truth:
    """GLM-4.5(-Air): BF16, or "fp8_channel_compressed" as GLM-4.5-Air-FP8. The MTP layer has its own embedding and head."""
    heads, kv_heads, head = 4, 2, 64
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": inter,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": top_k,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e6,
            "num_nextn_predict_layers": int(mtp),
            "rms_norm_eps": 1e-5,
        }
    )
    dense = scheme if scheme.startswith("fp8") else "bf16"
    w = Writer(seed, hidden, dense)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    skip = ["lm_head", "model.embed_tokens", "re:.*mlp.gate$", "re:.*eh_proj$", "re:.*shared_head.head$"]
    for n in range(layers + mtp):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        grouped(w, f"{p}.self_attn", heads, kv_heads, head, bias=True)
        if n == 0:
            w.mlp(f"{p}.mlp", 2 * hidden)
        else:
            _moe(w, config, n, scheme)
    if mtp:
        _mtp(w, f"model.layers.{layers}")
        for name, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            w.tensors[f"model.layers.{layers}.{name}.weight"] = w.tensors[f"{source}.weight"]
            w.values[f"model.layers.{layers}.{name}.weight"] = w.values[f"{source}.weight"]
    return w.save(out, config | quant_configs.for_scheme(scheme, skip))


def write_glm_moe_dsa(
    out: Path,
    seed: int = 0,
    scheme: str = "fp8_block",
    layers: int = 5,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    mtp: bool = True,
    vocab: int = VOCAB,
    **more: object,
) -> Truth:
    """GLM-5 and 5.2: "fp8_block" as zai-org publishes it, or "nvfp4_modelopt" as nvidia does (MTP layer BF16). The MTP layer
    has its own indexer and neither embedding nor head. `more` replaces keys of config.json."""
    dense_layers = 2
    types = ["full" if n < 3 or n % 4 == 2 else "shared" for n in range(layers)]
    config = (
        COMMON
        | TOKENS
        | LATENT
        | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": inter,
            "num_hidden_layers": layers,
            "q_lora_rank": 128,
            "head_dim": 64,
            "qk_head_dim": 128,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": top_k,
            "first_k_dense_replace": dense_layers,
            "moe_layer_freq": 1,
            "mlp_layer_types": ["dense"] * dense_layers + ["sparse"] * (layers - dense_layers),
            "index_head_dim": 64,
            "index_n_heads": 4,
            "index_topk": 64,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "indexer_types": types,
            "index_share_for_mtp_iteration": True,
            "indexer_rope_interleave": True,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_router_dtype": "float32",
            "rms_norm_eps": 1e-5,
            "num_nextn_predict_layers": int(mtp),
            "attention_bias": False,
            "vocab_size": vocab,
        }
        | more
    )
    fp8 = scheme.startswith("fp8")
    w = Writer(seed, hidden, scheme if fp8 else "bf16", vocab)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    for n in range(layers + mtp):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        latent(w, f"{p}.self_attn", config)
        if n >= layers or types[n] == "full":
            indexer(w, f"{p}.self_attn.indexer", config)
        if n < dense_layers:
            w.mlp(f"{p}.mlp", 2 * hidden)
        else:
            _moe(w, config, n, scheme if fp8 or n < layers else "bf16")
    if mtp:
        _mtp(w, f"model.layers.{layers}")
    return w.save(out, config | quant_configs.for_scheme(scheme, _skipped(config, fp8)))


def _skipped(config: dict, fp8: bool) -> list[str]:
    """zai-org lists norms, gates and (under a slip of the pen) the indexer's weights_proj; nvidia lists whole layers."""
    layers, first, mtp = (
        config["num_hidden_layers"],
        config["first_k_dense_replace"],
        config["num_nextn_predict_layers"],
    )
    out = ["lm_head", "model.embed_tokens"]
    if not fp8:
        out += [f"model.layers.{n}*" for n in range(first)]
        out += [
            f"model.layers.{n}.{x}"
            for n in range(first, layers)
            for x in ("mlp.shared_experts*", "self_attn*")
        ]
        return out + ([f"model.layers.{layers}*"] if mtp else [])
    for n in range(layers + mtp):
        p = f"model.layers.{n}"
        out += [
            f"{p}.{x}"
            for x in (
                "input_layernorm",
                "post_attention_layernorm",
                "self_attn.q_a_layernorm",
                "self_attn.kv_a_layernorm",
            )
        ]
        if n >= first:
            out += [f"{p}.mlp.gate", f"{p}.mlp.gate.e_score_correction_bias"]
        if n >= layers or config["indexer_types"][n] == "full":
            out += [f"{p}.self_attn.{x}" for x in ("indexers_proj", "indexer.k_norm", "indexer.k_norm.bias")]
    return out + (
        [f"model.layers.{layers}.{x}" for x in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
        if mtp
        else []
    )
