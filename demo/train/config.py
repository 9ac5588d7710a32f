"""The demo model's dimensions and its Hugging Face configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """A small DeepSeek-V3: one dense layer, five MoE layers, one MTP layer (index 6)."""

    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 6
    dense_layers: int = 1
    dense_intermediate: int = 768
    expert_intermediate: int = 256
    experts: int = 32
    active: int = 4
    routed_scale: float = 1.5
    heads: int = 4
    q_rank: int = 128
    kv_rank: int = 512
    nope: int = 64
    rope: int = 64
    value: int = 128
    theta: float = 10000.0
    context: int = 2048
    eps: float = 1e-6

    @property
    def moe_layers(self) -> int:
        """MoE layers, the MTP layer's included."""
        return self.layers - self.dense_layers + 1

    def to_hf(self, bos: int, eos: int, pad: int) -> dict:
        """config.json of the unquantized model."""
        # Rope type yarn with factor 1 is plain rope; vLLM's CPU kernel rotates MLA's queries
        # rightly only for yarn.
        rope = {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": self.context,
        }
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_intermediate,
            "moe_intermediate_size": self.expert_intermediate,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.active,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.routed_scale,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "rope_interleave": True,
            "rope_theta": self.theta,
            "rope_parameters": rope,
            "rope_scaling": {"type": "yarn"} | rope,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }
