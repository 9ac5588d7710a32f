"""Every model and every number format: experts are, in float64, exactly what the generator wrote."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moet.checkpoint import Checkpoint, ExpertWeights, LocalSource, dequantize
from moet.checkpoint.weights import scale_shape
from tests import generators as g
from tests.cpu.checkpoint_writer import Tiny, same
from tests.generators.safetensors_file import write_folder
from tests.generators.schemes import FORMATS, SCHEMES, Raw
from tests.generators.truth import Truth
from tests.generators.writer import Writer

MODELS = {
    "v2": (g.write_deepseek_v2, {}),
    "v3-fp8": (g.write_deepseek_v3, {"scheme": "fp8_block"}),
    "v3-nvfp4": (g.write_deepseek_v3, {"scheme": "nvfp4_modelopt"}),
    "v3-nvfp4-split": (g.write_deepseek_v3, {"scheme": "nvfp4_modelopt", "split_multipliers": True}),
    "v32": (g.write_deepseek_v32, {}),
    "v4-fp4": (g.write_deepseek_v4, {}),
    "v4-base": (g.write_deepseek_v4, {"scheme": "fp8_block_v4"}),
    "v4-nvfp4": (g.write_deepseek_v4, {"scheme": "nvfp4_modelopt"}),
    "kimi-k2": (g.write_kimi_k2, {}),
    "kimi-k25": (g.write_kimi_k25, {}),
    "glm45": (g.write_glm4_moe, {}),
    "glm52-nvfp4": (g.write_glm_moe_dsa, {}),
    "glm52-fp8": (g.write_glm_moe_dsa, {"scheme": "fp8_block"}),
    "qwen3": (g.write_qwen3_moe, {}),
    "qwen3-fp8": (g.write_qwen3_moe, {"scheme": "fp8_block_bf16"}),
    "gpt-oss": (g.write_gpt_oss, {}),
    "gpt-oss-bf16": (g.write_gpt_oss, {"quantized": False}),
    "mixtral": (g.write_mixtral, {}),
    "minimax": (g.write_minimax_m2, {}),
    "olmoe": (g.write_olmoe, {}),
}


def check_experts(checkpoint: Checkpoint, truth: Truth) -> None:
    """All experts of all layers against the truth; each layer's format, shapes and dtypes against the
    contract."""
    assert {(layer.index, e) for layer in checkpoint.spec.layers for e in range(layer.experts)} == set(
        truth.experts
    )
    for layer in checkpoint.spec.layers:
        assert checkpoint.native_format(layer.index) == truth.sites[layer.index].format
        for expert in checkpoint.experts(layer.index):
            expected = truth.experts[layer.index, expert.expert]
            for name in ("gate", "up", "down"):
                matrix = getattr(expert, name)
                same(dequantize(matrix), getattr(expected, name))
                bias = getattr(expected, f"{name}_bias")
                assert (matrix.bias is None) == (bias is None)
                assert bias is None or np.array_equal(matrix.bias, bias)
                assert checkpoint.biased(layer.index) == (bias is not None)


def stored_bytes(expert: ExpertWeights) -> int:
    return sum(m.codes.nbytes for m in (expert.gate, expert.up, expert.down))


@pytest.mark.parametrize("key", MODELS)
def test_models(key, tmp_path):
    write, options = MODELS[key]
    truth = write(tmp_path / "c", **options)
    with_check = Checkpoint.open(tmp_path / "c")
    with_check.check()
    check_experts(with_check, truth)


SHAPES = [(64, 96), (96, 64), (160, 96), (320, 192), (576, 160), (720, 32)]


@pytest.mark.parametrize(
    "scheme, shape", [(s, n) for s in SCHEMES for n in SHAPES if not (s.startswith("mxfp4") and n[0] % 32)]
)
def test_formats_and_odd_sizes(scheme, shape, tmp_path):
    """Partial FP8 blocks (576 = 4.5 x 128), one block or many, gate's shape square to nothing."""
    hidden, inter = shape
    truth = Tiny(scheme, hidden, inter).save(tmp_path / "c")
    checkpoint = Checkpoint.open(tmp_path / "c")
    check_experts(checkpoint, truth)
    expert = checkpoint.expert(0, 2)
    assert (expert.gate.rows, expert.gate.cols, expert.down.rows, expert.down.cols) == (
        inter,
        hidden,
        hidden,
        inter,
    )
    assert expert.gate.format == FORMATS[scheme]
    if expert.gate.format != "bf16":
        assert expert.down.scales.shape == scale_shape(expert.down.format, hidden, inter)
        assert expert.down.scale_dtype


def test_codes_are_the_files_own_bytes(tmp_path):
    tiny = Tiny("mxfp4_v4")
    tiny.save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    expert = checkpoint.expert(0, 1)
    for name, matrix in (("gate_proj", expert.gate), ("up_proj", expert.up), ("down_proj", expert.down)):
        stored = tiny.tensors[tiny.name(1, f"{name}.weight")].data
        assert (
            matrix.codes.tobytes()
            == stored.tobytes()
            == checkpoint.read(tiny.name(1, f"{name}.weight")).tobytes()
        )
        assert matrix.codes.ctypes.data % 64 == 0
        assert matrix.scales.tobytes() == tiny.tensors[tiny.name(1, f"{name}.scale")].data.tobytes()


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4_modelopt", "fp8_block_bf16", "mxfp4_v4"])
def test_expert_bytes_are_the_files(scheme, tmp_path):
    tiny = Tiny(scheme)
    tiny.save(tmp_path)
    own = sum(t.data.nbytes for name, t in tiny.tensors.items() if ".experts.1." in name)
    assert Checkpoint.open(tmp_path).expert_bytes(0) == own


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E8M0"])
def test_scale_dtypes_widen_exactly(dtype, tmp_path):
    """The same E4M3 codes with a scale of 2**-3 in each dtype mean the same numbers, byte for byte."""
    tiny = Tiny("fp8_block")
    bits = {
        "F32": np.float32(0.125),
        "BF16": np.uint16(0x3E00),
        "F16": np.float16(0.125),
        "F8_E8M0": np.uint8(124),
    }[dtype]
    for e in range(3):
        for p in ("gate_proj", "up_proj", "down_proj"):
            name = tiny.name(e, f"{p}.weight_scale_inv")
            tiny.tensors[name] = Raw(dtype, np.full(tiny.tensors[name].data.shape, bits))
    tiny.save(tmp_path)
    matrix = Checkpoint.open(tmp_path).expert(0, 0).gate
    assert matrix.scale_dtype == dtype
    assert (matrix.scales == np.float32(0.125)).all()


def test_e8m0_scales_equal_u8_scales(tmp_path):
    """A U8 scale is an exponent, not a factor. 0 is 2**-127, 254 is 2**127."""
    values = {}
    for dtype in ("F8_E8M0", "U8"):
        tiny = Tiny("mxfp4_v4")
        for name, tensor in list(tiny.tensors.items()):
            if name.endswith(".scale"):
                tiny.tensors[name] = Raw(dtype, tensor.data)
        tiny.poke(tiny.name(0, "gate_proj.scale"), 0, 0)
        tiny.poke(tiny.name(0, "gate_proj.scale"), 1, 127)
        tiny.poke(tiny.name(0, "gate_proj.scale"), 2, 254)
        tiny.save(tmp_path / dtype)
        values[dtype] = dequantize(Checkpoint.open(tmp_path / dtype).expert(0, 0).gate)
    same(values["U8"], values["F8_E8M0"])
    assert abs(values["U8"][1, 0]) in 2.0**127 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_modelopt_and_compressed_tensors_spell_the_same_weights(tmp_path):
    """One multiplier of 2**-9 as weight_scale_2 and as its reciprocal."""
    a = Tiny("nvfp4_modelopt")
    for name in list(a.tensors):
        if name.endswith("weight_scale_2"):
            a.tensors[name] = Raw("F32", np.array(2.0**-9, np.float32))
    a.save(tmp_path / "modelopt")
    b = Tiny("nvfp4_modelopt")
    for name in list(b.tensors):
        tensor = b.tensors.pop(name)
        if name.endswith("weight_scale_2"):
            tensor, name = (
                Raw("F32", np.array([2.0**9], np.float32)),
                name.replace("weight_scale_2", "weight_global_scale"),
            )
        elif ".experts." in name and name.endswith("_proj.weight"):
            name = name.replace(".weight", ".weight_packed")
        elif name.endswith("input_scale"):
            tensor, name = (
                Raw("F32", np.array([500], np.float32)),
                name.replace("input_scale", "input_global_scale"),
            )
        b.tensors[name] = tensor
    b.save(tmp_path / "compressed")
    for x, y in zip(
        Checkpoint.open(tmp_path / "modelopt").experts(0),
        Checkpoint.open(tmp_path / "compressed").experts(0),
        strict=True,
    ):
        assert x.gate.multiplier == y.gate.multiplier == 2.0**-9
        for name in ("gate", "up", "down"):
            same(dequantize(getattr(x, name)), dequantize(getattr(y, name)))


def test_multiplier_counts_once_and_each_matrix_has_its_own(tmp_path):
    tiny = Tiny("nvfp4_modelopt")
    tiny.tensors[tiny.name(1, "gate_proj.weight_scale_2")] = Raw("F32", np.array([3], np.float32))
    tiny.tensors[tiny.name(1, "up_proj.weight_scale_2")] = Raw("F32", np.array(12, np.float32))
    tiny.save(tmp_path)
    expert = Checkpoint.open(tmp_path).expert(0, 1)
    assert (expert.gate.multiplier, expert.up.multiplier) == (3, 12)
    one = Tiny("nvfp4_modelopt")
    for p in ("gate_proj", "up_proj"):
        one.tensors[one.name(1, f"{p}.weight_scale_2")] = Raw("F32", np.array(1, np.float32))
    one.save(tmp_path / "one")
    unit = Checkpoint.open(tmp_path / "one").expert(0, 1)
    same(dequantize(expert.gate), 3 * dequantize(unit.gate))
    same(dequantize(expert.up), 12 * dequantize(unit.up))


def test_nvfp4_without_input_scale_is_weight_only(tmp_path):
    tiny = Tiny("nvfp4_modelopt")
    for name in [n for n in tiny.tensors if n.endswith("input_scale")]:
        del tiny.tensors[name]
    truth = tiny.save(tmp_path)
    check_experts(Checkpoint.open(tmp_path), truth)


def test_layers_may_have_different_formats(tmp_path):
    truth = Tiny(("nvfp4_modelopt", "bf16", "fp8_block", "fp8_channel_compressed")).save(tmp_path, shards=3)
    checkpoint = Checkpoint.open(tmp_path)
    check_experts(checkpoint, truth)
    assert [checkpoint.native_format(n) for n in range(4)] == ["nvfp4", "bf16", "fp8", "fp8_row"]


@pytest.mark.parametrize("inter", [96, 128])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_experts(scheme, inter, tmp_path):
    """[E, 2F, H] with gate above up. At F = 96 an FP8 block of 128 rows reaches from gate into up."""
    hidden, experts, random = 160, 3, np.random.default_rng(0)
    tiny, expected = Tiny(scheme, hidden, inter, experts), {}
    for name in [n for n in tiny.tensors if ".experts." in n]:
        del tiny.tensors[name]
    for name, shape in (("gate_up_proj", (2 * inter, hidden)), ("down_proj", (hidden, inter))):
        stored = [SCHEMES[scheme]("", random.standard_normal(shape)) for _ in range(experts)]
        expected |= {(e, name): one.value for e, one in enumerate(stored)}
        for suffix, first in stored[0].tensors.items():
            data = np.stack([one.tensors[suffix].data for one in stored])
            tiny.tensors[f"model.layers.0.mlp.experts.{name}{suffix}"] = Raw(first.dtype, data)
    tiny.save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check()
    assert checkpoint.native_format(0) == FORMATS[scheme]
    for expert in checkpoint.experts(0):
        same(dequantize(expert.gate), expected[expert.expert, "gate_up_proj"][:inter])
        same(dequantize(expert.up), expected[expert.expert, "gate_up_proj"][inter:])
        same(dequantize(expert.down), expected[expert.expert, "down_proj"])
    assert checkpoint.expert_bytes(0) * experts == sum(
        t.data.nbytes for name, t in tiny.tensors.items() if ".experts." in name
    )


def test_deepseek_v41_names_and_draft_layers_with_fewer_experts(tmp_path):
    """`layers.N.ffn.experts.E.w1` and `mtp.K.`, whose layers count on from num_hidden_layers; vision and
    engram are dense."""
    w, names = Writer(0, 64), ("w1", "w3", "w2")
    for layer, prefix, experts in ((0, "layers.0", 4), (1, "layers.1", 4), (2, "mtp.0", 2), (3, "mtp.1", 2)):
        w.experts(layer, f"{prefix}.ffn.experts", experts, 96, "mxfp4_v4", names)
        w.plain(f"{prefix}.ffn.gate.weight", w.normal(experts, 64))
        w.mlp(f"{prefix}.ffn.shared_experts", 96, names, scheme="fp8_block32_e8m0")
    for name in (
        "embed.weight",
        "head.weight",
        "norm.weight",
        "vision.norm.weight",
        "aligner.w1.weight",
        "image_start",
        "layers.1.engram.q_weight",
        "mtp.1.markov_head.embed.weight",
    ):
        w.plain(name, w.normal(4, 64))
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "n_routed_experts": 4,
        "dspark_n_routed_experts": 2,
        "moe_intermediate_size": 96,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 2,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
    }
    truth = w.save(tmp_path, {"architectures": ["DeepseekV41ForCausalLM"], "text_config": text})
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check()
    check_experts(checkpoint, truth)
    assert [(x.index, x.experts, x.mtp) for x in checkpoint.spec.layers] == [
        (0, 4, False),
        (1, 4, False),
        (2, 2, True),
        (3, 2, True),
    ]
    dense = {name for shard in checkpoint.shards for name in checkpoint.dense_names(shard)}
    assert dense == {name for name in w.tensors if ".experts." not in name}


def test_threads_share_a_checkpoint(tmp_path):
    truth = Tiny(("nvfp4_modelopt", "bf16"), experts=8).save(tmp_path, shards=2)
    checkpoint = Checkpoint.open(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        experts = list(pool.map(lambda n: checkpoint.expert(n % 2, n // 2 % 8), range(64)))
    for expert in experts:
        same(dequantize(expert.up), truth.experts[expert.layer, expert.expert].up)


def test_release_closes_the_file_and_tells_the_source(tmp_path):
    Tiny().save(tmp_path, shards=2)
    told = []

    class Source(LocalSource):
        def release(self, shard: str) -> None:
            told.append(shard)
            (tmp_path / shard).unlink()

    checkpoint = Checkpoint.open(Source(tmp_path))
    first = checkpoint.expert(0, 0)
    descriptors = {
        os.readlink(f"/proc/self/fd/{n}")
        for n in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{n}")
    }
    assert any(str(tmp_path) in d for d in descriptors)
    for shard in checkpoint.shards:
        checkpoint.release(shard)
    assert told == list(checkpoint.shards)
    open_files = [
        os.readlink(f"/proc/self/fd/{n}")
        for n in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{n}")
    ]
    assert not [d for d in open_files if str(tmp_path) in d], (
        "a deleted file keeps its space while it is open"
    )
    assert np.isfinite(dequantize(first.gate)).all()


def test_expert_by_number(tmp_path):
    Tiny().save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.expert(0, 2).expert == 2
    assert [e.expert for e in checkpoint.experts(0)] == [0, 1, 2]
    assert stored_bytes(checkpoint.expert(0, 2)) == checkpoint.expert_bytes(0)


def test_modelopts_transposed_gpt_oss(tmp_path):
    """NVFP4 as modelopt exports gpt-oss: `gate_up_proj` U8 [E, H/2, 2F] with interleaved columns, one
    multiplier for all experts."""
    truth = g.write_gpt_oss(tmp_path / "source", quantized=False, layers=1, hidden=64, inter=96, experts=3)
    header = Checkpoint.open(tmp_path / "source")
    tensors = {
        name: Raw("BF16", header.read(name).view(np.uint16))
        for name in header._shard_of
        if "experts" not in name
    }
    prefix, expected = "model.layers.0.mlp.experts.", {}
    for name, both in (("gate_up_proj", True), ("down_proj", False)):
        codes, scales = [], []
        for e in range(3):
            x = truth.experts[0, e]
            wide = np.stack([x.gate, x.up], 1).reshape(-1, 64) if both else x.down
            stored = SCHEMES["nvfp4_modelopt"]("x", wide, amax=8.0)
            codes.append(stored.tensors["x.weight"].data.T)
            scales.append(stored.tensors["x.weight_scale"].data.T)
            expected[e, name] = stored.value
        tensors[f"{prefix}{name}"] = Raw("U8", np.stack(codes))
        tensors[f"{prefix}{name}_weight_scale"] = Raw("F8_E4M3", np.stack(scales))
        tensors[f"{prefix}{name}_weight_scale_2"] = stored.tensors["x.weight_scale_2"]
        tensors[f"{prefix}{name}_input_scale"] = stored.tensors["x.input_scale"]
        tensors[f"{prefix}{name}_bias"] = Raw(
            "BF16", header.read(f"{prefix}{name}_bias").view(np.uint16).reshape(3, -1)
        )
    for name, tensor in tensors.items():
        if "experts" not in name:
            tensors[name] = Raw("BF16", tensor.data.reshape(header.tensor_info(name).shape))
    write_folder(tmp_path / "c", tensors, truth.config)
    checkpoint = Checkpoint.open(tmp_path / "c")
    checkpoint.check()
    for expert in checkpoint.experts(0):
        same(dequantize(expert.gate), expected[expert.expert, "gate_up_proj"][0::2])
        same(dequantize(expert.up), expected[expert.expert, "gate_up_proj"][1::2])
        same(dequantize(expert.down), expected[expert.expert, "down_proj"])
        assert np.array_equal(expert.gate.bias, truth.experts[0, expert.expert].gate_bias)
        assert np.array_equal(expert.up.bias, truth.experts[0, expert.expert].up_bias)
