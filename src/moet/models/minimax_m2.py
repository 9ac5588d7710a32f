"""MiniMax M2, M2.1, M2.5, M2.7. Their config counts MTP modules that the files do not hold."""

from moet.models.family import W1_W3_W2, ModelFamily

MINIMAX_M2 = ModelFamily(
    architectures=("MiniMaxM2ForCausalLM",),
    experts=("model.layers.{layer}.block_sparse_moe.experts.",),
    router="block_sparse_moe.gate.weight",
    dense=("model.layers.{layer}.", "model.embed_tokens.", "model.norm.", "lm_head."),
    projections=W1_W3_W2,
    count=("num_local_experts",),
    inter="intermediate_size",
)
