"""Qwen3-MoE and OLMoE: grouped-query attention, softmax routing, no shared expert."""

from pathlib import Path

from . import quant_configs
from .attention import grouped
from .truth import Truth
from .writer import COMMON, TOKENS, VOCAB, Writer


def write_qwen3_moe(
    out: Path,
    seed: int = 0,
    scheme: str = "bf16",
    layers: int = 2,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    dense: str | None = None,
    split_multipliers: bool = False,
    shards: int = 2,
    vocab: int = VOCAB,
) -> Truth:
    """Qwen3-30B-A3B. `scheme`: any of `SCHEMES`; `dense`: the other linears' scheme, by default that of the publisher:
    the same for fp8 (Qwen3-30B-A3B-FP8), BF16 for the others (modelopt's and llmcompressor's experts-only recipes)."""
    dense = dense or (scheme if scheme in ("fp8_block", "fp8_block_bf16", "fp8_block_f16") else "bf16")
    heads, kv_heads, head = (
        max(hidden // 128 * 4, 4),
        4,
        32,
    )  # 4 x 32 rows of k and v: vLLM refuses FP8 blocks across them
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": inter,
            "intermediate_size": 2 * hidden,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "vocab_size": vocab,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": layers,
        }
    )
    w = Writer(seed, hidden, dense, vocab)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    skip = ["lm_head", "model.embed_tokens"]
    for n in range(layers):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        grouped(w, f"{p}.self_attn", heads, kv_heads, head, query_norm=head, key_norm=head)
        w.linear(f"{p}.mlp.gate", experts, hidden, scheme="bf16")
        w.experts(n, f"{p}.mlp.experts", experts, inter, scheme, split_multipliers=split_multipliers)
        skip += [f"{p}.mlp.gate"]
        if dense == "bf16":
            skip += [f"{p}.self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return w.save(out, config | quant_configs.for_scheme(scheme, skip), shards)


def write_olmoe(
    out: Path,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
) -> Truth:
    """OLMoE-1B-7B, BF16: norms over all heads at once, top-k weights not renormalized."""
    heads, head = 4, hidden // 4
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "intermediate_size": inter,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "clip_qkv": None,
        }
    )
    w = Writer(seed, hidden)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    for n in range(layers):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        grouped(w, f"{p}.self_attn", heads, heads, head, query_norm=hidden, key_norm=hidden)
        w.linear(f"{p}.mlp.gate", experts, hidden)
        w.experts(n, f"{p}.mlp.experts", experts, inter, "bf16")
    return w.save(out, config)
