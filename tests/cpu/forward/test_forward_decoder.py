"""The decoder's logits against transformers' own, loaded whole from a plain checkpoint of the same values."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moet.checkpoint import Checkpoint, dequantize_expert
from moet.errors import CheckpointError
from tests import generators as g

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moet.forward import Decoder
from moet.forward.experts import FusedExperts

ROOT = Path(__file__).parents[3]
PLAIN = {
    "v2": (g.write_deepseek_v2, {}),
    "v3": (g.write_deepseek_v3, {"scheme": "bf16"}),
    "glm4": (g.write_glm4_moe, {"scheme": "bf16"}),
    "qwen3": (g.write_qwen3_moe, {"scheme": "bf16"}),
    "gpt-oss": (g.write_gpt_oss, {"quantized": False}),
    "mixtral": (g.write_mixtral, {}),
    "olmoe": (g.write_olmoe, {}),
}
QUANTIZED = {
    "v3-fp8": (g.write_deepseek_v3, {"scheme": "fp8_block"}),
    "v32-fp8": (g.write_deepseek_v32, {"scheme": "fp8_block"}),
    "v4-fp4": (g.write_deepseek_v4, {}),
    "glm52-fp8": (g.write_glm_moe_dsa, {"scheme": "fp8_block"}),
    "kimi-k2": (g.write_kimi_k2, {}),
    "kimi-k25": (g.write_kimi_k25, {}),
    "minimax-fp8": (g.write_minimax_m2, {}),
    "qwen3-nvfp4": (g.write_qwen3_moe, {"scheme": "nvfp4_modelopt"}),
}


def ids(config: dict, batch: int = 3, length: int = 40) -> "torch.Tensor":
    return torch.from_numpy(np.random.default_rng(1).integers(3, config["vocab_size"], (batch, length)))


def logits(decoder: Decoder, tokens: "torch.Tensor") -> "torch.Tensor":
    states = decoder.embed(tokens)
    for index in range(decoder.layers):
        with decoder.layer(index) as module:
            states = decoder.run(module, states, index)
    return decoder.logits(states)


def reference(folder: Path, tokens: "torch.Tensor") -> "torch.Tensor":
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        return model(tokens).logits


def close(ours: "torch.Tensor", theirs: "torch.Tensor") -> bool:
    """float32 rounding: a few hundred additions of numbers like the logits, in another order."""
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() < 1e-4 * theirs.abs().max())


@pytest.mark.parametrize("key", PLAIN)
def test_logits_of_plain_checkpoints(key, tmp_path):
    write, options = PLAIN[key]
    truth = write(tmp_path, **options)
    tokens = ids(truth.config)
    assert close(logits(Decoder.open(Checkpoint.open(tmp_path)), tokens), reference(tmp_path, tokens))


@pytest.mark.parametrize("key", QUANTIZED)
def test_logits_of_quantized_checkpoints(key, tmp_path):
    write, options = QUANTIZED[key]
    truth = write(tmp_path / "c", **options)
    tokens = ids(truth.config.get("text_config", truth.config))
    folder = truth.write_dequantized(tmp_path / "plain")
    assert close(logits(Decoder.open(Checkpoint.open(tmp_path / "c")), tokens), reference(folder, tokens))


def test_logits_of_the_demo(tmp_path):
    subprocess.run([sys.executable, ROOT / "demo/dequantize.py", ROOT / "demo/model", tmp_path], check=True)
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = ids(config, 4, 100)
    assert close(
        logits(Decoder.open(Checkpoint.open(ROOT / "demo/model")), tokens), reference(tmp_path, tokens)
    )


def test_one_layer_has_weights_at_a_time(tmp_path):
    g.write_mixtral(tmp_path)
    decoder = Decoder.open(Checkpoint.open(tmp_path))

    def filled() -> set[str]:
        return {name for name, p in decoder.model.named_parameters() if not p.is_meta}

    with decoder.layer(1) as module:
        assert filled() == {f"model.layers.1.{name}" for name, _ in module.named_parameters()}
    with decoder.layer(0, experts=False) as module:
        assert not any("experts" in name for name in filled()) and filled()
    assert not filled()


@pytest.mark.parametrize("key", ["mixtral", "gpt-oss"])
def test_set_experts_overwrites_one(key, tmp_path):
    write, options = PLAIN[key]
    write(tmp_path, **options)
    checkpoint = Checkpoint.open(tmp_path)
    decoder = Decoder.open(checkpoint)
    tokens = ids(checkpoint.config)
    states = decoder.embed(tokens)
    zero = [torch.from_numpy(m) * 0 for m in dequantize_expert(checkpoint.expert(0, 0), np.float32)]
    one, two = (dequantize_expert(checkpoint.expert(0, e), np.float32) for e in (0, 1))
    with decoder.layer(0) as module:
        before = decoder.run(module, states, 0)
        decoder.set_experts(module, 1, *map(torch.from_numpy, one))
        for e in (1, 0):
            decoder.set_experts(module, e, *zero)
        for e, matrices in enumerate((one, two)):
            decoder.set_experts(module, e, *map(torch.from_numpy, matrices))
        assert torch.equal(decoder.run(module, states, 0).hidden, before.hidden)
        decoder.set_experts(module, 1, *zero)
        changed = (decoder.run(module, states, 0).hidden != before.hidden).any(-1)
    assert changed.any() and not changed.all()


def test_experts_are_the_checkpoints_values(tmp_path):
    g.write_deepseek_v4(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with Decoder.open(checkpoint).layer(0) as module:
        fused = FusedExperts.of(module).module
        for weights in checkpoint.experts(0):
            gate, up, down = (m.astype(np.float32) for m in dequantize_expert(weights))
            assert np.array_equal(fused.gate_up_proj[weights.expert].numpy(), np.concatenate([gate, up]))
            assert np.array_equal(fused.down_proj[weights.expert].numpy(), down)


def test_an_architecture_that_transformers_lacks_is_named(tmp_path, monkeypatch):
    g.write_mixtral(tmp_path)
    monkeypatch.setattr("moet.forward.decoder.transformers", SimpleNamespace(__version__="4.0"))
    with pytest.raises(CheckpointError, match="MixtralForCausalLM"):
        Decoder.open(Checkpoint.open(tmp_path))


def test_mtp_layer_of_the_demo(monkeypatch, tmp_path):
    """Against the program that trained it, whose forward is its own."""
    monkeypatch.syspath_prepend(ROOT / "demo" / "train")
    for name in ("checkpoint", "config", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from checkpoint import from_hf, read
    from config import ModelConfig
    from model import Model

    subprocess.run([sys.executable, ROOT / "demo/dequantize.py", ROOT / "demo/model", tmp_path], check=True)
    model = Model(ModelConfig())
    model.load_state_dict(from_hf(read(tmp_path), ModelConfig()))
    tokens = ids({"vocab_size": 8192}, 2, 65)
    decoder = Decoder.open(Checkpoint.open(ROOT / "demo/model"))
    states = decoder.embed(tokens)
    for index in range(decoder.layers):
        with decoder.layer(index) as module:
            states = decoder.run(module, states, index)
    states = decoder.mtp_input(states)
    with decoder.layer(decoder.mtp) as module:
        hidden = decoder.run(module, states, decoder.mtp).hidden
    with torch.no_grad():
        assert close(model.mtp.norm(hidden), model(tokens)[1])


def test_which_models_have_an_mtp_layer_that_runs(tmp_path):
    g.write_glm4_moe(tmp_path / "glm", scheme="bf16")
    g.write_mixtral(tmp_path / "mixtral")
    g.write_deepseek_v4(tmp_path / "v4")
    found = {name: Decoder.open(Checkpoint.open(tmp_path / name)).mtp for name in ("glm", "mixtral", "v4")}
    spec = Checkpoint.open(tmp_path / "glm").spec
    assert found == {"glm": spec.mtp_layers[0].index, "mixtral": None, "v4": None}
