"""Turns the demo's NVFP4 checkpoint into a plain one that transformers and vLLM load unmodified.

    python demo/dequantize.py demo/model /tmp/demo-plain [--dtype float32|bfloat16]

Every quantized matrix is multiplied out in float64 and rounded once to the wanted type, so the
result is the reference that any other reader of the NVFP4 file is compared with. It needs
numpy, torch and safetensors only.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

# E2M1: one sign bit, two exponent bits, one mantissa bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 16
KEPT_FLOAT32 = "e_score_correction_bias"
# Most of the demo fits one shard.
SHARD = 512 * 2**20


def dequantize(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """NVFP4 to float64.

    packed [N, K / 2] uint8, the low nibble is the even column; scale [N, K / 16] float8_e4m3fn;
    scale_2 one float32. Returns [N, K].
    """
    nibbles = packed.numpy()
    codes = np.stack((nibbles & 15, nibbles >> 4), axis=-1).reshape(len(nibbles), -1)
    # e4m3 values are exact in float32.
    factors = scale.float().numpy().astype(np.float64) * float(scale_2)
    return torch.from_numpy(E2M1[codes] * np.repeat(factors, GROUP, axis=1))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()
            tensors |= {name: file.get_tensor(name) for name in names}
    if not tensors:
        raise FileNotFoundError(f"no safetensors files in {folder}")
    return tensors


def plain(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same weights without quantization; the MTP layer, unquantized in the source, stays."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith((".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_scale_2" in tensors:
            tensor = dequantize(tensor, tensors[f"{stem}.weight_scale"], tensors[f"{stem}.weight_scale_2"])
        out[name] = tensor.to(torch.float32 if name.endswith(KEPT_FLOAT32) else dtype).contiguous()
    return out


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Shards, and the index over them."""
    shards, size = [{}], 0
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size()
        if size + count > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += count
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of the NVFP4 checkpoint")
    parser.add_argument("target", type=Path, help="folder to write, created if missing")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if args.source.resolve() == args.target.resolve():
        parser.error("source and target are the same folder")
    args.target.mkdir(parents=True, exist_ok=True)
    write(plain(read(args.source), getattr(torch, args.dtype)), args.target)
    config = json.loads((args.source / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = args.dtype
    config.pop("torch_dtype", None)
    (args.target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in args.source.iterdir():
        if (
            path.name not in ("config.json", "hf_quant_config.json")
            and ".safetensors" not in path.name
            and path.is_file()
        ):
            shutil.copy(path, args.target / path.name)


if __name__ == "__main__":
    main()
