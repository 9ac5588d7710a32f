"""The generators against other people's readers: safetensors, torch's number formats, transformers' model classes."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors import safe_open

from tests import generators as g
from tests.generators import numbers as nb

WRITERS = [getattr(g, name) for name in g.__all__ if name.startswith("write_")]


def test_rounding_equals_torch() -> None:
    """E4M3 and BF16 against torch over the whole range, with ties, subnormals and saturation."""
    random = np.random.default_rng(0)
    x = random.standard_normal(20000) * np.exp2(random.integers(-12, 9, 20000))
    ties = (nb.E4M3[:126] + nb.E4M3[1:127]) / 2
    x = np.clip(np.concatenate([x, ties, -ties, [0.0, -0.0, 448]]), -448, 448).astype(np.float32)
    codes = torch.from_numpy(x).to(torch.float8_e4m3fn)
    assert np.array_equal(nb.to_e4m3(x), codes.view(torch.uint8).numpy())
    assert np.array_equal(nb.E4M3[nb.to_e4m3(x)], codes.double().numpy())
    bits = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(nb.to_bf16(x), bits.view(torch.uint16).numpy())
    assert np.array_equal(nb.from_bf16(nb.to_bf16(x)), bits.float().numpy())


def test_e2m1_rounds_to_even() -> None:
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.1, -0.0])
    assert nb.E2M1[nb.to_e2m1(x)].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, 0]
    assert nb.to_e2m1(np.array([-0.1, -0.0, 0.0])).tolist() == [8, 8, 0]


@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_safetensors_reads_it_and_seeds_repeat(write, tmp_path) -> None:
    """Another reader finds every tensor; the same seed gives the same bytes."""
    write(tmp_path / "a")
    write(tmp_path / "b")
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    for file in (tmp_path / "a").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert all(tensors.get_tensor(name).numel() for name in tensors.keys())


@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_transformers_knows_every_name(write, tmp_path) -> None:
    """The model class misses nothing, and what it does not expect is the MTP layer, which it leaves out by design."""
    truth = write(tmp_path / "ckpt")
    folder = truth.write_dequantized(tmp_path / "wide")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    last = model.config.num_hidden_layers
    assert all(name.startswith(f"model.layers.{last}.") for name in info["unexpected_keys"]), info[
        "unexpected_keys"
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 45)[None]).logits
    assert torch.isfinite(logits).all() and 1 < logits.std() < 10


@pytest.mark.parametrize(
    "write, options",
    [
        (g.write_deepseek_v4, {}),
        (g.write_deepseek_v4, {"scheme": "fp8_block_v4"}),
        (g.write_gpt_oss, {}),
        (g.write_qwen3_moe, {"scheme": "fp8_block"}),
        (g.write_qwen3_moe, {"scheme": "fp8_block_bf16"}),
        (g.write_minimax_m2, {}),
        (g.write_deepseek_v3, {"scheme": "fp8_block", "mtp": 0, "qk_rope_head_dim": 128}),
    ],
    ids=lambda v: (
        getattr(v, "__name__", None) or "-".join(v.values().__str__().strip("dict_values([])").split())
    ),
)
def test_transformers_dequantizes_to_the_same_values(write, options, tmp_path) -> None:
    """transformers' own dequantization of the written file, in BF16, equals the truth rounded to BF16. (It does not read partial
    blocks, so the rotary part is 128 wide here: 512 + 128 rows are 5 whole blocks.)"""
    truth = write(tmp_path, **options)
    if truth.config["quantization_config"]["quant_method"] == "fp8":
        pytest.importorskip("accelerate", reason="transformers reads FP8 with accelerate (requirements/exporters.lock)")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", **_dequantize(truth.config)
    )
    oss = truth.config["model_type"] == "gpt_oss"
    hidden = truth.config["num_hidden_layers"]
    for (layer, index), expert in truth.experts.items():
        if layer >= hidden:
            continue
        block = model.model.layers[layer].mlp.experts
        both, down = block.gate_up_proj[index].detach(), block.down_proj[index].detach()
        gate, up = (both.T[0::2], both.T[1::2]) if oss else both.chunk(2)
        for got, want in zip(
            (gate, up, down.T if oss else down), (expert.gate, expert.up, expert.down), strict=True
        ):
            assert got.shape == want.shape
            assert torch.equal(got.float(), torch.from_numpy(want).to(torch.bfloat16).float()), (layer, index)


def _dequantize(config: dict) -> dict:
    if config["quantization_config"]["quant_method"] == "mxfp4":
        return {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    return {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
