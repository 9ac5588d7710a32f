"""transformers and compressed-tensors load the same files; their parameters, in BF16, are our values rounded
to BF16."""

from pathlib import Path

import numpy as np
import pytest

from moet.checkpoint import Checkpoint, Matrix, dequantize, read_header
from moet.numerics import narrow_bf16
from tests import generators as g
from tests.cpu.checkpoint_writer import Tiny
from tests.generators import schemes
from tests.generators.safetensors_file import write_folder
from tests.generators.schemes import ITEM, Raw

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODELS = {
    "v2-bf16": (g.write_deepseek_v2, {}),
    "v3-fp8": (g.write_deepseek_v3, {"scheme": "fp8_block"}),
    "v4-fp4": (g.write_deepseek_v4, {}),
    "v4-base": (g.write_deepseek_v4, {"scheme": "fp8_block_v4"}),
    "glm45-bf16": (g.write_glm4_moe, {"scheme": "bf16"}),
    "glm52-fp8": (g.write_glm_moe_dsa, {"scheme": "fp8_block"}),
    "qwen3-bf16": (g.write_qwen3_moe, {"scheme": "bf16"}),
    "qwen3-fp8": (g.write_qwen3_moe, {"scheme": "fp8_block_bf16"}),
    "gpt-oss-mxfp4": (g.write_gpt_oss, {}),
    "gpt-oss-bf16": (g.write_gpt_oss, {"quantized": False}),
    "mixtral-bf16": (g.write_mixtral, {}),
    "minimax-fp8": (g.write_minimax_m2, {"scheme": "fp8_block"}),
    "olmoe-bf16": (g.write_olmoe, {}),
}


PARTIAL_BLOCKS = ("v3-fp8", "glm52-fp8")
"""Their kv_a_proj_with_mqa has a partial block, which transformers 5 cannot load (it divides rows by scale
rows)."""


def dense_in_bf16(checkpoint: Checkpoint, truth: g.Truth, out: Path) -> Path:
    """The same file with only the routed experts quantized."""
    tensors = {}
    for shard in checkpoint.shards:
        dense = set(checkpoint.dense_names(shard))
        for name, info in read_header(checkpoint.root / shard).items():
            if name not in dense:
                tensors[name] = Raw(
                    info.dtype, checkpoint.read(name).view(ITEM[info.dtype]).reshape(info.shape)
                )
    for name, values in truth.values.items():
        tensors[name] = schemes.raw("BF16", values)
    config = dict(truth.config)
    skip = sorted({name.rsplit(".", 1)[0] for name in truth.values})
    config["quantization_config"] = config["quantization_config"] | {"modules_to_not_convert": skip}
    write_folder(out, tensors, config)
    return out


def bits(values: np.ndarray) -> np.ndarray:
    """float64 -> float32 -> BF16 bits: the two roundings that transformers does too, as it multiplies in
    float32."""
    return narrow_bf16(values.astype(np.float32))


def parameter_bits(parameter: "torch.Tensor") -> np.ndarray:
    assert parameter.dtype == torch.bfloat16
    return parameter.detach().contiguous().view(torch.uint16).numpy()


@pytest.fixture
def without_accelerate(monkeypatch):
    """transformers asks for accelerate before it loads a quantized file, and does not use it on a CPU."""
    import transformers.quantizers.quantizer_finegrained_fp8 as fp8
    import transformers.quantizers.quantizer_mxfp4 as mxfp4

    for module in (fp8, mxfp4):
        monkeypatch.setattr(module, "is_accelerate_available", lambda *_: True)


@pytest.mark.parametrize("key", MODELS)
def test_transformers_has_the_same_experts(key, tmp_path, without_accelerate):
    write, options = MODELS[key]
    truth = write(tmp_path / "c", **options)
    checkpoint = Checkpoint.open(tmp_path / "c")
    folder = dense_in_bf16(checkpoint, truth, tmp_path / "dense") if key in PARTIAL_BLOCKS else tmp_path / "c"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    compared = 0
    for layer in checkpoint.spec.layers:
        if layer.mtp:
            continue  # transformers leaves MTP out
        theirs = model.model.layers[layer.index].mlp.experts
        oai = checkpoint.spec.activation.kind == "swiglu_oai"
        for expert in checkpoint.experts(layer.index):
            e, both, down = expert.expert, theirs.gate_up_proj[expert.expert], theirs.down_proj[expert.expert]
            if oai:  # [K, N], interleaved
                gate, up, down = both[:, 0::2].T, both[:, 1::2].T, down.T
                assert np.array_equal(
                    bits(expert.gate.bias), parameter_bits(theirs.gate_up_proj_bias[e, 0::2])
                )
                assert np.array_equal(bits(expert.up.bias), parameter_bits(theirs.gate_up_proj_bias[e, 1::2]))
                assert np.array_equal(bits(expert.down.bias), parameter_bits(theirs.down_proj_bias[e]))
            else:
                gate, up = both.chunk(2)
            for ours, parameter in ((expert.gate, gate), (expert.up, up), (expert.down, down)):
                assert np.array_equal(bits(dequantize(ours)), parameter_bits(parameter)), (layer.index, e)
                compared += 1
    assert compared == 3 * sum(layer.experts for layer in checkpoint.spec.layers if not layer.mtp) > 0


@pytest.mark.parametrize(
    "scheme", ["nvfp4_compressed", "mxfp4_compressed", "fp8_channel_compressed", "fp8_block_compressed"]
)
def test_compressed_tensors_decompresses_to_the_same(scheme, tmp_path):
    """compressed-tensors works in BF16 or float32 arithmetic; the difference is at most its rounding (2**-8
    of a value)."""
    pytest.importorskip("compressed_tensors")
    tiny = Tiny(scheme, hidden=256, inter=256)  # it tells blocks from rows by shape: two blocks both ways
    tiny.save(tmp_path)
    expert = Checkpoint.open(tmp_path).expert(0, 1)
    for name, matrix in (("gate_proj", expert.gate), ("up_proj", expert.up), ("down_proj", expert.down)):
        state = {tail: as_torch(tiny.tensors[tiny.name(1, f"{name}.{tail}")]) for tail in tails(tiny, name)}
        theirs = decompress(scheme, state).double().numpy()
        ours = dequantize(matrix)
        assert np.abs(ours).max() > 0
        assert np.array_equal(ours == 0, theirs == 0)
        assert np.all(np.abs(theirs - ours) <= np.abs(ours) * 2.0**-8), name
    assert isinstance(expert.gate, Matrix)


def tails(tiny: Tiny, name: str) -> list[str]:
    start = tiny.name(1, f"{name}.")
    return [n.removeprefix(start) for n in tiny.tensors if n.startswith(start)]


def as_torch(raw) -> "torch.Tensor":
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    return torch.from_numpy(raw.data.copy()).view(dtypes[raw.dtype])


def decompress(scheme: str, state: dict) -> "torch.Tensor":
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    formats = {
        "nvfp4_compressed": (
            "nvfp4-pack-quantized",
            dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True),
        ),
        "mxfp4_compressed": (
            "mxfp4-pack-quantized",
            dict(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True),
        ),
        "fp8_channel_compressed": (
            "float-quantized",
            dict(num_bits=8, type="float", strategy="channel", symmetric=True),
        ),
        "fp8_block_compressed": (
            "float-quantized",
            dict(num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True),
        ),
    }
    name, arguments = formats[scheme]
    compressor = BaseCompressor.get_value_from_registry(name)
    return compressor.decompress(
        state, QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    )["weight"]
