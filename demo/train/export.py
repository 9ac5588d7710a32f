"""The trained BF16 checkpoint as NVFP4, written by nvidia-modelopt, with the MTP layer merged back in BF16.

transformers drops the MTP layer when it loads a DeepSeek-V3, so modelopt never sees it; its
tensors are copied from the trained checkpoint, as in NVIDIA's own GLM-5.2 files.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import checkpoint
import torch
from data import load

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def calibration(work: Path, count: int, length: int) -> torch.Tensor:
    """Evenly spaced training windows [count, length], half of text and half of conversations."""
    rows = []
    for name in ("text", "chat"):
        tokens, _ = load(work / f"{name}.npz")
        step = (len(tokens) - length) // (count // 2)
        rows += [
            torch.from_numpy(tokens[i * step : i * step + length].astype("int64")) for i in range(count // 2)
        ]
    return torch.stack(rows)


def quantize(trained: Path, windows: torch.Tensor, folder: Path) -> None:
    """Runs modelopt's experts-only NVFP4 recipe over `trained` and writes its export to `folder`."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16, attn_implementation="eager")

    def forward(module):
        with torch.no_grad():
            for part in windows.split(8):
                module(input_ids=part.to(module.device))

    mtq.quantize(model, copy.deepcopy(mtq.NVFP4_EXPERTS_ONLY_CFG), forward)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder)


def merge(trained: Path, exported: Path, model: Path) -> None:
    """Writes demo/model's weights and configuration: modelopt's export plus the MTP layer."""
    original = json.loads((trained / "config.json").read_text())
    prefix = f"model.layers.{original['num_hidden_layers']}."
    tensors = checkpoint.read(exported)
    mtp = {n: t for n, t in checkpoint.read(trained).items() if n.startswith(prefix)}
    assert mtp and not any(n.startswith(prefix) for n in tensors)
    checkpoint.write(tensors | mtp, model)

    config = json.loads((exported / "config.json").read_text())
    quant = json.loads((exported / "hf_quant_config.json").read_text())
    for modules in (config["quantization_config"]["ignore"], quant["quantization"]["exclude_modules"]):
        modules.append(prefix[:-1] + "*")
    # transformers rewrites the configuration as it loads it; what it does not know must stay.
    config = original | config | {"num_nextn_predict_layers": 1, "rope_scaling": original["rope_scaling"]}
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (model / "hf_quant_config.json").write_text(json.dumps(quant, indent=2) + "\n")


def main(trained: Path, demo: Path, work: Path) -> None:
    exported = work / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    quantize(trained, calibration(work, count=16, length=256), exported)
    merge(trained, exported, demo / "model")
    missing = [name for name in TOKENIZER_FILES if not (demo / "model" / name).exists()]
    assert not missing, f"tokenizer files missing from demo/model: {missing}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent.parent
    main(Path(sys.argv[1]), here, Path(sys.argv[2]) if len(sys.argv) > 2 else here / ".work")
