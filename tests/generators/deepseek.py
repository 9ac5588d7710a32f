"""DeepSeek-V2, V3, V3.2 and Kimi K2: latent attention, shared experts, dense first layers, a multi-token-prediction layer."""

import json
from pathlib import Path

from . import quant_configs
from .attention import indexer, latent
from .truth import Truth
from .writer import COMMON, TOKENS, VOCAB, Writer

# vLLM's CPU kernel for latent attention is compiled for 512 + 64 only, and its rotary embedding is right for yarn only:
# factor 1 leaves the frequencies as they are.
LATENT = dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
YARN = dict(type="yarn", factor=1.0, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)


def _base(hidden: int, layers: int, inter: int, experts: int, top_k: int, query_rank: int | None, mtp: int) -> dict:
    return COMMON | TOKENS | LATENT | dict(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=2 * hidden, moe_intermediate_size=inter, n_routed_experts=experts,
        num_experts_per_tok=top_k, q_lora_rank=query_rank, first_k_dense_replace=1, moe_layer_freq=1, n_shared_experts=1,
        rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=YARN, attention_bias=False, num_nextn_predict_layers=mtp,
        topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, n_group=1, topk_group=1, routed_scaling_factor=1.0)


def _layers(w: Writer, config: dict, scheme: str, root: str = "model", bias: bool = True, mtp_scheme: str | None = None,
            indexed: bool = False, split_multipliers: bool = False) -> None:
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
        w.experts(n, f"{p}.mlp.experts", config["n_routed_experts"], inter, mine, split_multipliers=split_multipliers)
        w.mlp(f"{p}.mlp.shared_experts", inter * config["n_shared_experts"])
        if mtp:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                w.norm(f"{p}.{name}", hidden)
            w.linear(f"{p}.eh_proj", hidden, 2 * hidden, scheme="bf16")
            for name, source in (("embed_tokens", f"{root}.embed_tokens"), ("shared_head.head", root.removesuffix("model") + "lm_head")):
                w.tensors[f"{p}.{name}.weight"] = w.tensors[f"{source}.weight"]
                w.values[f"{p}.{name}.weight"] = w.values[f"{source}.weight"]


def _ignored(config: dict, root: str = "model") -> list[str]:
    """What modelopt's experts-only recipe leaves alone; a published one leaves out the whole MTP layer."""
    count = config["num_hidden_layers"]
    parts = [f"{root}.layers.{n}.{x}" for n in range(1, count) for x in ("mlp.gate", "mlp.shared_experts*", "self_attn*")]
    last = [f"{root}.layers.{count}*"] if config["num_nextn_predict_layers"] else []
    return [f"{root.removesuffix('model')}lm_head", f"{root}.embed_tokens", f"{root}.layers.0*", *parts, *last]


def write_deepseek_v2(out: Path, seed: int = 0, layers: int = 3, hidden: int = 256, inter: int = 128, experts: int = 8, top_k: int = 2) -> Truth:
    """DeepSeek-V2-Lite, BF16: one query projection, softmax routing without a bias, two shared experts in one."""
    config = _base(hidden, layers, inter, experts, top_k, None, 0) | dict(
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", topk_method="greedy", scoring_func="softmax",
        norm_topk_prob=False, n_shared_experts=2)
    w = Writer(seed, hidden)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    _layers(w, config, "bf16", bias=False)
    return w.save(out, config)


def write_deepseek_v3(out: Path, seed: int = 0, scheme: str = "bf16", layers: int = 3, hidden: int = 256, inter: int = 128,
                      experts: int = 16, top_k: int = 4, mtp: int = 1, mtp_scheme: str | None = None, hf_quant_only: bool = False,
                      split_multipliers: bool = False, vocab: int = VOCAB, **more: object) -> Truth:
    """DeepSeek-V3: "bf16", "fp8_block" (the published one, all linears), or "nvfp4_modelopt" (experts only, MTP layer BF16,
    as nvidia's). `hf_quant_only`: the quantization stands in hf_quant_config.json alone, as in older modelopt exports.
    `more` replaces keys of config.json."""
    config = _base(hidden, layers, inter, experts, top_k, 128, mtp) | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", n_group=4, topk_group=2, routed_scaling_factor=2.5,
        vocab_size=vocab) | more
    modelopt = scheme in quant_configs.MODELOPT_ALGORITHMS
    w = Writer(seed, hidden, "bf16" if modelopt else scheme, vocab)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    _layers(w, config, scheme, mtp_scheme=mtp_scheme or ("bf16" if modelopt else None), split_multipliers=split_multipliers)
    if not modelopt:
        return w.save(out, config | quant_configs.for_scheme(scheme, []))
    truth = w.save(out, config if hf_quant_only else config | quant_configs.for_scheme(scheme, _ignored(config)))
    (out / "hf_quant_config.json").write_text(json.dumps(quant_configs.hf_quant(scheme, _ignored(config)), indent=1))
    return truth


def write_deepseek_v32(out: Path, seed: int = 0, scheme: str = "fp8_block", layers: int = 3, hidden: int = 256, inter: int = 128,
                       experts: int = 8, top_k: int = 2) -> Truth:
    """DeepSeek-V3.2: V3 with an indexer in every layer; scale_fmt says ue8m0 while the scales are F32."""
    config = _base(hidden, layers, inter, experts, top_k, 128, 1) | dict(
        architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32", index_head_dim=128, index_n_heads=4, index_topk=64)
    w = Writer(seed, hidden, scheme)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    _layers(w, config, scheme, indexed=True)
    return w.save(out, config | {"quantization_config": quant_configs.fp8(scale_fmt="ue8m0")})


def write_kimi_k2(out: Path, seed: int = 0, scheme: str = "fp8_block", layers: int = 3, hidden: int = 256, inter: int = 128,
                  experts: int = 8, top_k: int = 2) -> Truth:
    """Kimi-K2, the text model: DeepSeek-V3's tensors with one group and no MTP layer, model_type kimi_k2."""
    config = _base(hidden, layers, inter, experts, top_k, 128, 0) | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", routed_scaling_factor=2.827, rms_norm_eps=1e-5, rope_theta=50000.0)
    modelopt = scheme in quant_configs.MODELOPT_ALGORITHMS
    w = Writer(seed, hidden, "bf16" if modelopt else scheme)
    w.embeddings("model.embed_tokens", "model.norm", "lm_head")
    _layers(w, config, scheme)
    return w.save(out, config | quant_configs.for_scheme(scheme, _ignored(config) if modelopt else []))


def write_kimi_k25(out: Path, seed: int = 0, scheme: str = "nvfp4_modelopt", layers: int = 3, hidden: int = 256, inter: int = 128,
                   experts: int = 8, top_k: int = 2) -> Truth:
    """Kimi-K2.5 and later: the text model under language_model., and a vision tower of two layers beside it."""
    text = _base(hidden, layers, inter, experts, top_k, 128, 0) | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", routed_scaling_factor=2.827, rms_norm_eps=1e-5, rope_theta=50000.0)
    size, wide, patch = 64, 128, 14
    vision = dict(vt_hidden_size=size, vt_intermediate_size=wide, vt_num_attention_heads=4, vt_num_hidden_layers=2, mm_hidden_size=size,
                  text_hidden_size=hidden, patch_size=patch, init_pos_emb_height=64, init_pos_emb_width=64, init_pos_emb_time=4,
                  merge_kernel_size=[2, 2], merge_type="sd2_tpool", mm_projector_type="patchmerger", projector_hidden_act="gelu",
                  projector_ln_eps=1e-5, pos_emb_type="divided_fixed", video_attn_type="spatial_temporal")
    config = TOKENS | dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text, vision_config=vision,
                           ignore_index=-100, media_placeholder_token_id=3, tie_word_embeddings=False, torch_dtype="bfloat16")
    w = Writer(seed, hidden)
    w.embeddings("language_model.model.embed_tokens", "language_model.model.norm", "language_model.lm_head")
    _layers(w, text, scheme, "language_model.model")
    w.plain("vision_tower.patch_embed.pos_emb.weight", w.normal(64, 64, size))
    w.plain("vision_tower.patch_embed.proj.weight", w.normal(size, 3, patch, patch))
    w.plain("vision_tower.patch_embed.proj.bias", w.normal(size))
    biased = [(f"vision_tower.encoder.blocks.{n}.{name}", rows, cols) for n in range(2) for name, rows, cols in (
        ("wqkv", 3 * size, size), ("wo", size, size), ("mlp.fc0", wide, size), ("mlp.fc1", size, wide))]
    biased += [("mm_projector.proj.0", 4 * size, 4 * size), ("mm_projector.proj.2", hidden, 4 * size)]
    for name, rows, cols in biased:
        w.linear(name, rows, cols)
        w.plain(f"{name}.bias", w.normal(rows))
    norms = [f"vision_tower.encoder.blocks.{n}.norm{i}" for n in range(2) for i in range(2)]
    for name in (*norms, "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        w.norm(name, size)
        w.plain(f"{name}.bias", w.normal(size))
    ignored = [*_ignored(text, "language_model.model"), "mm_projector*", "vision_tower*"]
    return w.save(out, config | quant_configs.for_scheme(scheme, ignored))
