"""DeepSeek-V4-Flash (MXFP4 experts) and V4-Flash-Base (FP8 experts): names without a `model.` prefix, scales named `.scale`,
compressed attention, hyper-connections, hash-routed first layers, an MTP block `mtp.0`."""

from pathlib import Path

import numpy as np

from . import quant_configs
from .truth import Truth
from .writer import COMMON, TOKENS, VOCAB, Writer

NAMES = ("w1", "w3", "w2")
STREAMS = 4  # hyper-connection streams (hc_mult)
MIX = STREAMS * (STREAMS + 2)


def _attention(w: Writer, name: str, config: dict, ratio: int) -> None:
    heads, head, query, groups = (
        config[k] for k in ("num_attention_heads", "head_dim", "q_lora_rank", "o_groups")
    )
    out, hidden = config["o_lora_rank"], w.hidden
    w.linear(f"{name}.wq_a", query, hidden)
    w.norm(f"{name}.q_norm", query)
    w.linear(f"{name}.wq_b", heads * head, query)
    w.linear(f"{name}.wkv", head, hidden)
    w.norm(f"{name}.kv_norm", head)
    w.linear(f"{name}.wo_a", groups * out, heads * head // groups)
    w.linear(f"{name}.wo_b", hidden, groups * out)
    w.plain(f"{name}.attn_sink", w.normal(heads), "F32")
    if ratio:
        _compressor(w, f"{name}.compressor", ratio, head)
    if ratio == 4:
        index_heads, index = config["index_n_heads"], config["index_head_dim"]
        w.linear(f"{name}.indexer.wq_b", index_heads * index, query)
        w.linear(f"{name}.indexer.weights_proj", index_heads, hidden, scheme="bf16")
        _compressor(w, f"{name}.indexer.compressor", ratio, index)


def _compressor(w: Writer, name: str, ratio: int, size: int) -> None:
    """Ratio 4 overlaps its windows, so it has two halves."""
    wide = size * (2 if ratio == 4 else 1)
    w.plain(f"{name}.ape", w.normal(ratio, wide), "F32")
    w.linear(f"{name}.wkv", wide, w.hidden, scheme="bf16")
    w.linear(f"{name}.wgate", wide, w.hidden, scheme="bf16")
    w.norm(f"{name}.norm", size)


def _hyper(w: Writer, name: str, rows: int, scales: int) -> None:
    w.plain(f"{name}_fn", w.normal(rows, STREAMS * w.hidden), "F32")
    w.plain(f"{name}_base", w.normal(rows), "F32")
    w.plain(f"{name}_scale", 0.5 + w.random.random(scales, np.float32), "F32")


def _block(w: Writer, name: str, config: dict, index: int, scheme: str, hashed: bool, tables: str) -> None:
    experts, top_k, inter = (
        config[k] for k in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    )
    _attention(w, f"{name}.attn", config, config["compress_ratios"][index])
    w.norm(f"{name}.attn_norm", w.hidden)
    w.norm(f"{name}.ffn_norm", w.hidden)
    w.linear(f"{name}.ffn.gate", experts, w.hidden, scheme="bf16")
    if hashed:
        w.plain(
            f"{name}.ffn.gate.tid2eid",
            np.stack([w.random.permutation(experts)[:top_k] for _ in range(VOCAB)]),
            tables,
        )
    else:
        w.plain(f"{name}.ffn.gate.bias", w.normal(experts), "F32")
    w.experts(index, f"{name}.ffn.experts", experts, inter, scheme, NAMES)
    w.mlp(f"{name}.ffn.shared_experts", inter, NAMES)
    _hyper(w, f"{name}.hc_attn", MIX, 3)
    _hyper(w, f"{name}.hc_ffn", MIX, 3)


def write_deepseek_v4(
    out: Path,
    seed: int = 0,
    scheme: str = "mxfp4_v4",
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    mtp: bool = True,
    tables: str = "I64",
    **more: object,
) -> Truth:
    """`scheme`: "mxfp4_v4" (V4-Flash; dense linears FP8 with E8M0 scales) or "fp8_block_v4" (V4-Flash-Base; F32 scales).
    `tables`: dtype of the hash routing tables, I64 or I32 (both are in circulation). `more` replaces keys of config.json."""
    flash = scheme == "mxfp4_v4"
    quantization = quant_configs.fp8(scale_fmt="ue8m0") if flash else quant_configs.fp8()
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "expert_dtype": "fp4" if flash else "fp8",
            "hidden_size": hidden,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "q_lora_rank": 128,
            "o_lora_rank": 128,
            "o_groups": 2,
            "qk_rope_head_dim": 32,
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": inter,
            "num_hash_layers": 2,
            "num_nextn_predict_layers": int(mtp),
            "compress_ratios": [0, 0, 4, 128, 4, 0],
            "index_n_heads": 4,
            "index_head_dim": 64,
            "index_topk": 16,
            "sliding_window": 32,
            "hc_mult": STREAMS,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "norm_topk_prob": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "quantization_config": quantization,
        }
        | more
    )
    w = Writer(seed, hidden, "fp8_block_e8m0" if flash else "fp8_block_v4")
    w.embeddings("embed", "norm", "head")
    _hyper(w, "hc_head", STREAMS, 1)
    layers = config["num_hidden_layers"]
    for n in range(layers):
        _block(w, f"layers.{n}", config, n, scheme, n < config["num_hash_layers"], tables)
    if mtp:
        _block(w, "mtp.0", config, layers, scheme, False, tables)
        for name in ("enorm", "hnorm", "norm"):
            w.norm(f"mtp.0.{name}", hidden)
        for name in ("e_proj", "h_proj"):
            w.linear(f"mtp.0.{name}", hidden, hidden)
        _hyper(w, "mtp.0.hc_head", STREAMS, 1)
    return w.save(out, config)
