"""Mixtral and MiniMax-M2: experts named w1 (gate), w3 (up), w2 (down) under block_sparse_moe."""

from pathlib import Path

from . import quant_configs
from .attention import grouped
from .truth import Truth
from .writer import COMMON, TOKENS, VOCAB, Writer

NAMES = ("w1", "w3", "w2")


def write_mixtral(
    out: Path,
    seed: int = 0,
    scheme: str = "bf16",
    layers: int = 2,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    vocab: int = VOCAB,
) -> Truth:
    """Mixtral-8x7B, with heads of 32."""
    heads, kv_heads = hidden // 32, 2
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_local_experts": experts,
            "num_experts_per_tok": top_k,
            "intermediate_size": inter,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "vocab_size": vocab,
        }
    )
    w = Writer(seed, hidden, vocab=vocab)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    skip = ["lm_head", "model.embed_tokens"]
    for n in range(layers):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        grouped(w, f"{p}.self_attn", heads, kv_heads, hidden // heads)
        w.linear(f"{p}.block_sparse_moe.gate", experts, hidden, scheme="bf16")
        w.experts(n, f"{p}.block_sparse_moe.experts", experts, inter, scheme, NAMES)
        skip += [f"{p}.block_sparse_moe.gate", f"{p}.self_attn*"]
    return w.save(out, config | quant_configs.for_scheme(scheme, skip))


def write_minimax_m2(
    out: Path,
    seed: int = 0,
    scheme: str = "fp8_block",
    layers: int = 2,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    vocab: int = VOCAB,
) -> Truth:
    """MiniMax-M2.x: sigmoid routing with a bias beside the gate (not under it), norms over all heads, partial rotary.
    The config promises MTP modules; the published files have none."""
    heads, kv_heads, head = (
        max(hidden // 128 * 4, 4),
        4,
        32,
    )  # 4 x 32 rows of k and v: vLLM refuses FP8 blocks across them
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "rotary_dim": 16,
            "num_local_experts": experts,
            "num_experts_per_tok": top_k,
            "intermediate_size": inter,
            "attn_type_list": [1] * layers,
            "qk_norm_type": "per_layer",
            "use_qk_norm": True,
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_mtp": True,
            "num_mtp_modules": 3,
            "mtp_transformer_layers": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "vocab_size": vocab,
        }
    )
    if scheme.startswith("fp8"):
        skip = ["gate", "e_score_correction_bias", "lm_head"]
        quantization: dict = {"quantization_config": quant_configs.fp8(skip=skip, fmt="float8_e4m3fn")}
    else:
        parts = [
            f"model.layers.{n}.{x}" for n in range(layers) for x in ("block_sparse_moe.gate", "self_attn*")
        ]
        quantization = quant_configs.for_scheme(scheme, ["lm_head", *parts])
    w = Writer(seed, hidden, scheme if scheme.startswith("fp8") else "bf16", vocab)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    for n in range(layers):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        grouped(w, f"{p}.self_attn", heads, kv_heads, head, query_norm=heads * head, key_norm=kv_heads * head)
        w.linear(f"{p}.block_sparse_moe.gate", experts, hidden, scheme="bf16")
        w.plain(f"{p}.block_sparse_moe.e_score_correction_bias", w.normal(experts), "F32")
        w.experts(n, f"{p}.block_sparse_moe.experts", experts, inter, scheme, NAMES)
    return w.save(out, config | quantization)
