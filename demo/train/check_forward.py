"""Checks that the training model and transformers' DeepseekV3ForCausalLM compute the same logits."""

import json
import tempfile
from pathlib import Path

import checkpoint
import torch
from config import ModelConfig
from model import Model
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    c = ModelConfig()
    model = Model(c)
    model.reset(std=0.08)  # large enough that attention and routing are far from uniform
    for moe in model.moes():
        moe.gate.e_score_correction_bias.normal_(std=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
    tokens = torch.randint(0, c.vocabulary, (2, 257))
    hidden, _, loads = model(tokens)
    ours = model.lm_head(hidden)
    with tempfile.TemporaryDirectory() as folder:
        tensors = checkpoint.to_hf(model.state_dict(), c)
        checkpoint.write(tensors, Path(folder))
        config = c.to_hf(bos=1, eos=2, pad=0) | {"dtype": "float32"}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        print({k: len(v) if k != "missing_keys" else v for k, v in info.items()})
        back = checkpoint.from_hf(checkpoint.read(Path(folder)), c)
    assert all(torch.equal(back[k], v) for k, v in model.state_dict().items()) and len(back) == len(
        model.state_dict()
    )
    difference = (theirs(tokens[:, :-1]).logits - ours).abs().max().item()
    print(
        {
            "largest difference": difference,
            "logit range": ours.abs().max().item(),
            "loads": loads[0].tolist()[:6],
            "parameters": sum(p.numel() for p in model.parameters()),
        }
    )
    assert difference < 1e-4 * max(1.0, ours.abs().max().item())


if __name__ == "__main__":
    main()
