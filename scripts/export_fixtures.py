"""Quantized checkpoints that other people's tools write: nvidia-modelopt and llmcompressor, from a tiny BF16 model, on a CPU.

    pip install --no-deps -r requirements/exporters.lock      # see its first lines
    python scripts/export_fixtures.py [--out tests/fixtures] [--sizes small|serve] [NAME ...]

Each folder is the tool's export as it stands, plus `tool/dequantized.safetensors`: the tool's own dequantization of the first
rows of every routed expert, float32, under `{layer}.{expert}.{gate|up|down}`, and `tool/made_by.json` (tool, version, recipe).
`small` is what tests/fixtures holds; `serve` has the sizes that vLLM's CPU kernels take, for scripts/architectures.py.
"""

import argparse
import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.generators import (
    write_deepseek_v3,
    write_glm_moe_dsa,
    write_minimax_m2,
    write_mixtral,
    write_qwen3_moe,
)

ROWS = 1
"""First rows of each matrix kept in dequantized.safetensors."""

NARROW = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 32,
}
SMALL = {"hidden": 64, "inter": 64, "experts": 4}


@dataclass(frozen=True)
class Export:
    """`source` writes the BF16 model; `recipe` is modelopt's config name or llmcompressor's scheme."""

    tool: str
    recipe: str
    source: Callable
    small: dict
    serve: dict


def _qwen(tool: str, recipe: str, **sizes: int) -> Export:
    return Export(tool, recipe, write_qwen3_moe, SMALL | {"vocab": 64, "layers": 1} | sizes, {})


EXPORTS = {
    "qwen3-moe-nvfp4-modelopt": _qwen("modelopt", "NVFP4_DEFAULT_CFG"),
    "qwen3-moe-nvfp4-experts-modelopt": _qwen("modelopt", "NVFP4_EXPERTS_ONLY_CFG"),
    "qwen3-moe-fp8-modelopt": _qwen("modelopt", "FP8_DEFAULT_CFG"),
    "qwen3-moe-fp8-block-modelopt": _qwen(
        "modelopt", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", hidden=128, inter=256, experts=2, vocab=32
    ),
    "qwen3-moe-mxfp4-modelopt": _qwen("modelopt", "MXFP4_DEFAULT_CFG"),
    "qwen3-moe-nvfp4-llmcompressor": _qwen("llmcompressor", "NVFP4A16"),
    "qwen3-moe-mxfp4-llmcompressor": _qwen("llmcompressor", "MXFP4"),
    "qwen3-moe-fp8-block-llmcompressor": _qwen(
        "llmcompressor", "FP8_BLOCK", hidden=128, inter=160, experts=2, vocab=32
    ),
    "qwen3-moe-fp8-channel-llmcompressor": _qwen("llmcompressor", "FP8_DYNAMIC"),
    "deepseek-v3-nvfp4-modelopt": Export(
        "modelopt",
        "NVFP4_EXPERTS_ONLY_CFG",
        write_deepseek_v3,
        SMALL | NARROW | {"vocab": 64, "layers": 2, "top_k": 2, "n_group": 2, "topk_group": 1, "mtp": 0},
        {"mtp": 0},
    ),
    "glm-5.2-nvfp4-modelopt": Export(
        "modelopt",
        "NVFP4_EXPERTS_ONLY_CFG",
        write_glm_moe_dsa,
        SMALL
        | NARROW
        | {
            "vocab": 64,
            "layers": 3,
            "mtp": False,
            "head_dim": 16,
            "qk_head_dim": 48,
            "index_head_dim": 32,
            "index_n_heads": 2,
            "experts": 2,
        },
        {"mtp": False},
    ),
    "minimax-m2-nvfp4-modelopt": Export(
        "modelopt", "NVFP4_EXPERTS_ONLY_CFG", write_minimax_m2, SMALL | {"vocab": 64, "layers": 1}, {}
    ),
    "mixtral-nvfp4-modelopt": Export(
        "modelopt", "NVFP4_EXPERTS_ONLY_CFG", write_mixtral, SMALL | {"vocab": 64, "layers": 1}, {}
    ),
}


def modelopt(source: Path, out: Path, recipe: str) -> None:
    """Calibrates on random tokens and exports in Hugging Face layout."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager")
    torch.manual_seed(0)

    def calibrate(module: torch.nn.Module) -> None:
        for _ in range(4):
            with torch.no_grad():
                module(input_ids=torch.randint(3, model.config.vocab_size, (2, 64)))

    mtq.quantize(model, copy.deepcopy(getattr(mtq, recipe)), calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=out)


def llmcompressor(source: Path, out: Path, recipe: str) -> None:
    """Rewrites the tensors shard by shard, without a model class."""
    from llmcompressor import model_free_ptq

    model_free_ptq(
        model_stub=str(source),
        save_directory=str(out),
        scheme=recipe,
        ignore=["re:.*gate$", "lm_head", "model.embed_tokens"],
        max_workers=1,
        device="cpu",
    )


def dequantized(tool: str, out: Path) -> dict[str, torch.Tensor]:
    """The tool's dequantization of every routed expert, by "{layer}.{expert}.{projection}", float32 [N, K]."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    unpack = _modelopt_value if tool == "modelopt" else _compressed_value
    words = {
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
        "w1": "gate",
        "w3": "up",
        "w2": "down",
    }
    values = {}
    for module in sorted({name.rsplit(".", 1)[0] for name in tensors if ".experts." in name}):
        parts = module.split(".")
        own = {name.rsplit(".", 1)[1]: t for name, t in tensors.items() if name.rsplit(".", 1)[0] == module}
        values[f"{parts[2]}.{parts[-2]}.{words[parts[-1]]}"] = unpack(own, out)
    return values


def _modelopt_value(own: dict[str, torch.Tensor], out: Path) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor

    weight, scale = own["weight"], own["weight_scale"]
    if "weight_scale_2" in own:
        shape = torch.Size([weight.shape[0], weight.shape[1] * 2])
        return NVFP4QTensor(shape, torch.float32, weight).dequantize(
            dtype=torch.float32, scale=scale, double_scale=own["weight_scale_2"], block_sizes={-1: 16}
        )
    if weight.dtype == torch.uint8:
        shape = torch.Size([weight.shape[0], weight.shape[1] * 2])
        return MXFP4QTensor(shape, torch.float32, weight).dequantize(
            dtype=torch.float32, scale=scale, block_sizes={-1: 32}
        )
    if scale.ndim == 4:  # blocks: [N/b, 1, K/b, 1]
        rows, cols = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[2]
        return weight.float() * scale.reshape(scale.shape[0], scale.shape[2]).repeat_interleave(
            rows, 0
        ).repeat_interleave(cols, 1)
    return weight.float() * scale


def _compressed_value(own: dict[str, torch.Tensor], out: Path) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = next(
        iter(json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"].values())
    )
    scheme = QuantizationScheme.model_validate(group)
    return BaseCompressor.load_from_registry(group["format"]).decompress(own, scheme)["weight"].float()


def export(name: str, out: Path, sizes: str) -> None:
    """One folder `out/name`."""
    e = EXPORTS[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "bf16"
        kind = {"scheme": "bf16"} if e.source is not write_qwen3_moe else {}
        e.source(source, **kind, **(e.small if sizes == "small" else e.serve))
        {"modelopt": modelopt, "llmcompressor": llmcompressor}[e.tool](source, folder, e.recipe)
        for token_file in source.glob("*token*"):
            shutil.copy(token_file, folder)
    few = {key: value[:ROWS].contiguous() for key, value in dequantized(e.tool, folder).items()}
    (folder / "tool").mkdir()
    save_file(few, folder / "tool" / "dequantized.safetensors")
    package = {"modelopt": "nvidia-modelopt", "llmcompressor": "llmcompressor"}[e.tool]
    made = {
        "tool": package,
        "version": version(package),
        "recipe": e.recipe,
        "transformers": version("transformers"),
        "torch": version("torch"),
        "source": e.source.__name__,
        "sizes": e.small if sizes == "small" else e.serve,
    }
    (folder / "tool" / "made_by.json").write_text(json.dumps(made, indent=1) + "\n")
    print(f"{name}: {sum(f.stat().st_size for f in folder.rglob('*')) / 1000:.0f} kB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(EXPORTS), help=f"of {', '.join(EXPORTS)}")
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures"))
    parser.add_argument("--sizes", choices=("small", "serve"), default="small")
    arguments = parser.parse_args()
    for name in arguments.names:
        export(name, arguments.out, arguments.sizes)


if __name__ == "__main__":
    main()
