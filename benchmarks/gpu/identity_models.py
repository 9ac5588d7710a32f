"""Two small models with random weights for the identity benchmark: a Qwen3-MoE and a DeepSeek-V3 with its MTP layer, whose logits differ from step to step.

Seeded, BF16, one shard each, without a tokenizer. Gains keep activations near 1 through the layers: what an expert adds then moves the logits.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTER, VOCAB, HEADS = 1024, 256, 2048, 16
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "moe_intermediate_size": INTER, "intermediate_size": 2 * HIDDEN, "hidden_act": "silu", "num_attention_heads": HEADS,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "norm_topk_prob": True,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN3 = COMMON | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
DEEPSEEK = COMMON | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 6, "num_key_value_heads": HEADS, "q_lora_rank": 512,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
}  # fmt: skip


class Weights:
    """Named BF16 tensors; a linear's entries have deviation gain / sqrt(inputs)."""

    def __init__(self, seed: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.random, device=self.device) * gain).to(torch.bfloat16).cpu()

    def linear(self, name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = self.normal(outputs, inputs, gain=gain / math.sqrt(inputs))

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    def mlp(self, prefix: str, inter: int) -> None:
        for name, outputs, inputs in (("gate_proj", inter, HIDDEN), ("up_proj", inter, HIDDEN), ("down_proj", HIDDEN, inter)):
            self.linear(f"{prefix}.{name}", outputs, inputs)

    def experts(self, prefix: str, count: int) -> None:
        for name, outputs, inputs, gain in (("gate_proj", INTER, HIDDEN, 1.0), ("up_proj", INTER, HIDDEN, 1.0), ("down_proj", HIDDEN, INTER, 4.0)):
            every = self.normal(count, outputs, inputs, gain=gain / math.sqrt(inputs))
            for i in range(count):
                self.tensors[f"{prefix}.experts.{i}.{name}.weight"] = every[i].clone()

    def outer(self) -> None:
        self.tensors["model.embed_tokens.weight"] = self.normal(VOCAB, HIDDEN)
        self.norm("model.norm", HIDDEN)
        self.linear("lm_head", VOCAB, HIDDEN, 3.0)


def qwen3(w: Weights) -> dict[str, Any]:
    w.outer()
    for layer in range(QWEN3["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        a, head, kv = f"{p}.self_attn", QWEN3["head_dim"], QWEN3["num_key_value_heads"]
        w.norm(f"{p}.input_layernorm", HIDDEN)
        w.norm(f"{p}.post_attention_layernorm", HIDDEN)
        w.linear(f"{a}.q_proj", HEADS * head, HIDDEN)
        w.linear(f"{a}.k_proj", kv * head, HIDDEN)
        w.linear(f"{a}.v_proj", kv * head, HIDDEN)
        w.linear(f"{a}.o_proj", HIDDEN, HEADS * head)
        w.norm(f"{a}.q_norm", head)
        w.norm(f"{a}.k_norm", head)
        w.linear(f"{p}.mlp.gate", QWEN3["num_experts"], HIDDEN)
        w.experts(f"{p}.mlp", QWEN3["num_experts"])
    return QWEN3


def deepseek(w: Weights) -> dict[str, Any]:
    c = DEEPSEEK
    w.outer()
    for layer in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        p = f"model.layers.{layer}"
        a = f"{p}.self_attn"
        w.norm(f"{p}.input_layernorm", HIDDEN)
        w.norm(f"{p}.post_attention_layernorm", HIDDEN)
        w.linear(f"{a}.q_a_proj", c["q_lora_rank"], HIDDEN)
        w.norm(f"{a}.q_a_layernorm", c["q_lora_rank"])
        w.linear(f"{a}.q_b_proj", HEADS * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), c["q_lora_rank"])
        w.linear(f"{a}.kv_a_proj_with_mqa", c["kv_lora_rank"] + c["qk_rope_head_dim"], HIDDEN)
        w.norm(f"{a}.kv_a_layernorm", c["kv_lora_rank"])
        w.linear(f"{a}.kv_b_proj", HEADS * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        w.linear(f"{a}.o_proj", HIDDEN, HEADS * c["v_head_dim"])
        if layer < c["first_k_dense_replace"]:
            w.mlp(f"{p}.mlp", c["intermediate_size"])
            continue
        w.linear(f"{p}.mlp.gate", c["n_routed_experts"], HIDDEN)
        w.tensors[f"{p}.mlp.gate.e_score_correction_bias"] = torch.zeros(c["n_routed_experts"], dtype=torch.float32)
        w.experts(f"{p}.mlp", c["n_routed_experts"])
        w.mlp(f"{p}.mlp.shared_experts", INTER)
    p = f"model.layers.{c['num_hidden_layers']}"   # the MTP layer
    w.norm(f"{p}.enorm", HIDDEN)
    w.norm(f"{p}.hnorm", HIDDEN)
    w.linear(f"{p}.eh_proj", HIDDEN, 2 * HIDDEN)
    w.norm(f"{p}.shared_head.norm", HIDDEN)
    w.tensors[f"{p}.shared_head.head.weight"] = w.tensors["lm_head.weight"].clone()
    w.tensors[f"{p}.embed_tokens.weight"] = w.tensors["model.embed_tokens.weight"].clone()
    return c


def write(name: str, out: Path, seed: int = 0) -> None:
    """name: `qwen3` or `deepseek`; out: an empty or new folder."""
    out.mkdir(parents=True, exist_ok=True)
    w = Weights(seed)
    config = {"qwen3": qwen3, "deepseek": deepseek}[name](w)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}))
    save_file(w.tensors, out / "model.safetensors", metadata={"format": "pt"})
