"""The two kinds of attention that most families share."""

from .writer import Writer


def grouped(
    w: Writer,
    name: str,
    heads: int,
    kv_heads: int,
    head: int,
    bias: bool = False,
    out_bias: bool = False,
    query_norm: int | None = None,
    key_norm: int | None = None,
) -> None:
    """Grouped-query attention; `query_norm`, `key_norm`: sizes of the optional RMS norms (per head, or over all heads)."""
    for projection, rows, cols in (
        ("q_proj", heads * head, w.hidden),
        ("k_proj", kv_heads * head, w.hidden),
        ("v_proj", kv_heads * head, w.hidden),
        ("o_proj", w.hidden, heads * head),
    ):
        w.linear(f"{name}.{projection}", rows, cols)
        if out_bias if projection == "o_proj" else bias:
            w.plain(f"{name}.{projection}.bias", w.normal(rows, gain=rows**0.5 / 10))
    if query_norm:
        w.norm(f"{name}.q_norm", query_norm)
    if key_norm:
        w.norm(f"{name}.k_norm", key_norm)


def latent(w: Writer, name: str, config: dict) -> None:
    """Multi-head latent attention of DeepSeek-V2 and later; q_lora_rank None has one query projection."""
    heads, query_rank, rank = config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if query_rank:
        w.linear(f"{name}.q_a_proj", query_rank, w.hidden)
        w.norm(f"{name}.q_a_layernorm", query_rank)
        w.linear(f"{name}.q_b_proj", heads * (nope + rope), query_rank)
    else:
        w.linear(f"{name}.q_proj", heads * (nope + rope), w.hidden)
    w.linear(f"{name}.kv_a_proj_with_mqa", rank + rope, w.hidden)
    w.norm(f"{name}.kv_a_layernorm", rank)
    w.linear(f"{name}.kv_b_proj", heads * (nope + value), rank)
    w.linear(f"{name}.o_proj", w.hidden, heads * value)


def indexer(w: Writer, name: str, config: dict) -> None:
    """The lightning indexer of sparse attention (DeepSeek-V3.2, GLM-5): weights_proj and k_norm are never quantized."""
    heads, size = config["index_n_heads"], config["index_head_dim"]
    w.linear(f"{name}.wq_b", heads * size, config["q_lora_rank"])
    w.linear(f"{name}.wk", size, w.hidden)
    w.linear(f"{name}.weights_proj", heads, w.hidden, scheme="bf16")
    w.norm(f"{name}.k_norm", size)
    w.plain(f"{name}.k_norm.bias", w.normal(size))
