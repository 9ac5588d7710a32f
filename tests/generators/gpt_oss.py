"""gpt-oss: fused experts with biases, gate and up rows interleaved, attention sinks."""

from pathlib import Path

import numpy as np

from . import numbers as nb
from .attention import grouped
from .schemes import Raw, mxfp4, raw
from .truth import Expert, Site, Truth, unquantized_experts
from .writer import COMMON, TOKENS, Writer


def _experts(w: Writer, layer: int, prefix: str, count: int, inter: int, quantized: bool) -> None:
    """MXFP4: `_blocks` U8 [E, N, K/32, 16] and `_scales` U8 [E, N, K/32]. BF16: transposed, [E, K, N]. Biases BF16."""
    encode = mxfp4("blocks", "scales")
    mine, blocks, scales = [], {"gate_up_proj": [], "down_proj": []}, {"gate_up_proj": [], "down_proj": []}
    for _ in range(count):
        value = {}
        for name, rows, cols, gain in (
            ("gate_up_proj", 2 * inter, w.hidden, 1),
            ("down_proj", w.hidden, inter, 4),
        ):
            stored = encode("x", w.normal(rows, cols, gain=gain))
            value[name] = (
                stored.value
            )  # BF16 holds every MXFP4 value exactly, so both flavours share the numbers
            blocks[name].append(stored.tensors["x.blocks"].data.reshape(rows, cols // 32, 16))
            scales[name].append(stored.tensors["x.scales"].data)
        bias = [
            nb.from_bf16(nb.to_bf16(w.normal(rows, gain=rows**0.5 / 4))) for rows in (2 * inter, w.hidden)
        ]
        both = value["gate_up_proj"]
        mine.append(Expert(both[0::2], both[1::2], value["down_proj"], bias[0][0::2], bias[0][1::2], bias[1]))
    site = Site(prefix, None, "mxfp4" if quantized else "bf16")
    w.sites[layer] = site
    w.known |= {(layer, e): expert for e, expert in enumerate(mine)}
    plain = unquantized_experts(site, mine)
    for name, array in plain.items():
        if not quantized or name.endswith("_bias"):
            w.tensors[name] = raw("BF16", array)
    if quantized:
        for name, codes in blocks.items():
            w.tensors[f"{prefix}.{name}_blocks"] = Raw("U8", np.stack(codes))
            w.tensors[f"{prefix}.{name}_scales"] = Raw("U8", np.stack(scales[name]))


def write_gpt_oss(
    out: Path,
    seed: int = 0,
    quantized: bool = True,
    layers: int = 2,
    hidden: int = 256,
    inter: int = 256,
    experts: int = 8,
    top_k: int = 2,
) -> Truth:
    """gpt-oss-20b and -120b (MXFP4), or the BF16 form that transformers writes. Alternating sliding and full attention."""
    heads, kv_heads, head = 4, 2, 64
    config = (
        COMMON
        | TOKENS
        | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": hidden,
            "intermediate_size": inter,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "num_local_experts": experts,
            "num_experts_per_tok": top_k,
            "experts_per_token": top_k,
            "layer_types": [("sliding_attention", "full_attention")[n % 2] for n in range(layers)],
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "initial_context_length": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "max_position_embeddings": 131072,
        }
    )
    if quantized:
        skip = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"modules_to_not_convert": skip, "quant_method": "mxfp4"}
    w = Writer(seed, hidden)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    for n in range(layers):
        p = f"model.layers.{n}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        grouped(w, f"{p}.self_attn", heads, kv_heads, head, bias=True, out_bias=True)
        w.plain(f"{p}.self_attn.sinks", w.normal(heads))
        w.linear(f"{p}.mlp.router", experts, hidden)
        w.plain(f"{p}.mlp.router.bias", w.normal(experts))
        _experts(w, n, f"{p}.mlp.experts", experts, inter, quantized)
    return w.save(out, config)
