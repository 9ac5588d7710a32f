"""Kimi-K2 (text) and K2.5 and later (with a vision tower): DeepSeek-V3's language model without an MTP layer."""

from pathlib import Path

from . import quant_configs
from .deepseek import base_config, experts_only, write_layers
from .truth import Truth
from .writer import TOKENS, Writer


def write_kimi_k2(
    out: Path,
    seed: int = 0,
    scheme: str = "fp8_block",
    layers: int = 3,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
) -> Truth:
    """Kimi-K2, the text model: DeepSeek-V3's tensors with one group and no MTP layer, model_type kimi_k2."""
    config = base_config(hidden, layers, inter, experts, top_k, 128, 0) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
    }
    modelopt = scheme in quant_configs.MODELOPT_ALGORITHMS
    w = Writer(seed, hidden, "bf16" if modelopt else scheme)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    write_layers(w, config, scheme)
    return w.save(out, config | quant_configs.for_scheme(scheme, experts_only(config) if modelopt else []))


def write_kimi_k25(
    out: Path,
    seed: int = 0,
    scheme: str = "nvfp4_modelopt",
    layers: int = 3,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
) -> Truth:
    """Kimi-K2.5 and later: the text model under language_model., and a vision tower of two layers beside it."""
    text = base_config(hidden, layers, inter, experts, top_k, 128, 0) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
    }
    size, wide, patch = 64, 128, 14
    vision = {
        "vt_hidden_size": size,
        "vt_intermediate_size": wide,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 2,
        "mm_hidden_size": size,
        "text_hidden_size": hidden,
        "patch_size": patch,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal",
    }
    # transformers and vLLM read the names below, and find their defaults in the published files.
    vision |= {
        "hidden_size": size,
        "intermediate_size": wide,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "projection_hidden_size": size,
    }
    config = TOKENS | {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "ignore_index": -100,
        "media_placeholder_token_id": 3,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    w = Writer(seed, hidden)
    w.embeddings("language_model.model.embed_tokens", "language_model.model.norm", "language_model.lm_head")
    write_layers(w, text, scheme, "language_model.model")
    w.plain("vision_tower.patch_embed.pos_emb.weight", w.normal(64, 64, size))
    w.plain("vision_tower.patch_embed.proj.weight", w.normal(size, 3, patch, patch))
    w.plain("vision_tower.patch_embed.proj.bias", w.normal(size))
    biased = [
        (f"vision_tower.encoder.blocks.{n}.{name}", rows, cols)
        for n in range(2)
        for name, rows, cols in (
            ("wqkv", 3 * size, size),
            ("wo", size, size),
            ("mlp.fc0", wide, size),
            ("mlp.fc1", size, wide),
        )
    ]
    biased += [("mm_projector.proj.0", 4 * size, 4 * size), ("mm_projector.proj.2", hidden, 4 * size)]
    for name, rows, cols in biased:
        w.linear(name, rows, cols)
        w.plain(f"{name}.bias", w.normal(rows))
    norms = [f"vision_tower.encoder.blocks.{n}.norm{i}" for n in range(2) for i in range(2)]
    for name in (*norms, "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        w.norm(name, size)
        w.plain(f"{name}.bias", w.normal(size))
    ignored = [*experts_only(text, "language_model.model"), "mm_projector*", "vision_tower*"]
    return w.save(out, config | quant_configs.for_scheme(scheme, ignored))
