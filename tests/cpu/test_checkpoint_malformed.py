"""Each way in which a checkpoint can be wrong is one CheckpointError that names the tensor or file, what was
expected and what was found."""

import json
import re

import numpy as np
import pytest

from moet.checkpoint import Checkpoint
from moet.errors import CheckpointError
from tests.cpu.checkpoint_writer import Tiny
from tests.generators.safetensors_file import write_file
from tests.generators.schemes import Raw

INDEX = "model.safetensors.index.json"


def refuse(tiny: Tiny, out, *words: str, shards: int = 1) -> str:
    """Saves, opens, checks, and reads all; the error has to say `words`."""
    tiny.save(out, shards)
    return refuse_folder(out, *words)


def refuse_folder(out, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint = Checkpoint.open(out)
        checkpoint.check()
        for layer in checkpoint.spec.layers:
            list(checkpoint.experts(layer.index))
    message = str(caught.value)
    for word in (*words, "expected", "ound"):
        assert word in message, f"{word!r} is not in: {message}"
    return message


def test_undamaged(tmp_path):
    Tiny("nvfp4_modelopt").save(tmp_path, shards=3)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check()
    assert len(list(checkpoint.experts(0))) == 3


@pytest.mark.parametrize(
    "tail",
    [
        "gate_proj.weight_zero_point",
        "gate_proj.weight_shape",
        "gate_proj",
        "experts.weight",
        "mid_proj.weight",
        "",
    ],
)
def test_unknown_name_under_the_experts(tail, tmp_path):
    tiny = Tiny()
    tiny.tensors[tiny.name(1, tail)] = Raw("U8", np.zeros(4, np.uint8))
    refuse(tiny, tmp_path, tiny.name(1, tail), "model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "model.rotary.inv_freq",
        "model.layers.7.input_layernorm.weight",
        "visual.proj.weight",
        "layers.0.attn.wq.weight",
    ],
)
def test_unknown_top_level_name(name, tmp_path):
    tiny = Tiny()
    tiny.tensors[name] = Raw("U8", np.zeros(4, np.uint8))
    refuse(tiny, tmp_path, name, "model.embed_tokens.", "model.layers.N.")


def test_leading_zero_is_no_expert_number(tmp_path):
    tiny = Tiny()
    tiny.tensors["model.layers.0.mlp.experts.01.up_proj.weight"] = tiny.tensors.pop(
        tiny.name(1, "up_proj.weight")
    )
    refuse(tiny, tmp_path, "experts.01.up_proj")


@pytest.mark.parametrize(
    "scheme, tail",
    [
        ("nvfp4_modelopt", "gate_proj.weight_scale"),
        ("nvfp4_modelopt", "down_proj.weight_scale_2"),
        ("nvfp4_modelopt", "up_proj.input_scale"),
        ("nvfp4_compressed", "up_proj.weight_global_scale"),
        ("mxfp4_v4", "up_proj.scale"),
        ("fp8_block", "down_proj.weight_scale_inv"),
        ("bf16", "down_proj.weight"),
    ],
)
def test_one_expert_lacks_a_tensor(scheme, tail, tmp_path):
    tiny = Tiny(scheme)
    del tiny.tensors[tiny.name(1, tail)]
    refuse(tiny, tmp_path, "layer 0", "expert 1", tiny.name(1, tail))


def test_an_expert_is_missing(tmp_path):
    tiny = Tiny("nvfp4_modelopt", experts=4)
    for name in [n for n in tiny.tensors if ".experts.3." in n]:
        del tiny.tensors[name]
    refuse(tiny, tmp_path, "layer 0", "expert 3")


def test_a_layer_is_missing(tmp_path):
    tiny = Tiny(("bf16", "bf16"))
    for name in [n for n in tiny.tensors if ".layers.1.mlp.experts." in n]:
        del tiny.tensors[name]
    refuse(tiny, tmp_path, "layer 1", "model.layers.1.mlp.experts.")


def test_a_router_is_missing(tmp_path):
    tiny = Tiny(("bf16", "bf16"))
    del tiny.tensors["model.layers.1.mlp.gate.weight"]
    refuse(tiny, tmp_path, "model.layers.1.mlp.gate.weight")


def test_more_experts_than_the_config_says(tmp_path):
    tiny = Tiny(experts=3)
    tiny.config["num_experts"] = 2
    refuse(tiny, tmp_path, tiny.name(2, "gate_proj.weight"), "experts 0 to 1")


def test_experts_in_a_dense_layer(tmp_path):
    tiny = Tiny(("bf16", "bf16"))
    tiny.config["mlp_only_layers"] = [1]
    refuse(tiny, tmp_path, tiny.name(0, "gate_proj.weight", layer=1), "config.json")


def test_two_tensors_for_one_part(tmp_path):
    tiny = Tiny("fp8_block")
    tiny.tensors[tiny.name(0, "up_proj.weight_scale")] = tiny.tensors[
        tiny.name(0, "up_proj.weight_scale_inv")
    ]
    refuse(tiny, tmp_path, "up_proj.weight_scale", "up_proj.weight_scale_inv")


def test_fused_and_single_experts(tmp_path):
    tiny = Tiny()
    tiny.tensors["model.layers.0.mlp.experts.gate_up_proj"] = Raw("BF16", np.zeros((3, 192, 64), np.uint16))
    refuse(tiny, tmp_path, "fused", "layer 0")


def test_fused_down_is_missing(tmp_path):
    tiny = Tiny()
    for name in [n for n in tiny.tensors if ".experts." in n]:
        del tiny.tensors[name]
    tiny.tensors["model.layers.0.mlp.experts.gate_up_proj"] = Raw("BF16", np.zeros((3, 192, 64), np.uint16))
    refuse(tiny, tmp_path, "down", "layer 0")


@pytest.mark.parametrize("shape", [(2, 192, 64), (3, 64, 192), (3, 96, 64)])
def test_fused_shape(shape, tmp_path):
    tiny = Tiny()
    for name in [n for n in tiny.tensors if ".experts." in n]:
        del tiny.tensors[name]
    tiny.tensors["model.layers.0.mlp.experts.gate_up_proj"] = Raw("BF16", np.zeros(shape, np.uint16))
    tiny.tensors["model.layers.0.mlp.experts.down_proj"] = Raw("BF16", np.zeros((3, 64, 96), np.uint16))
    refuse(tiny, tmp_path, "model.layers.0.mlp.experts.gate_up_proj", str(list(shape)))


@pytest.mark.parametrize(
    "scheme, tail, index, value",
    [
        ("mxfp4_v4", "up_proj.scale", 3, 255),
        ("mxfp4_compressed", "up_proj.weight_scale", 3, 255),
        ("nvfp4_modelopt", "gate_proj.weight_scale", 5, 0x7F),
        ("nvfp4_modelopt", "gate_proj.weight_scale", 5, 0xFF),
        ("nvfp4_modelopt", "gate_proj.weight_scale", 5, 0x80),
        ("nvfp4_compressed", "down_proj.weight_scale", 5, 0xB0),
        ("nvfp4_modelopt", "down_proj.weight_scale_2", 0, np.nan),
        ("nvfp4_modelopt", "down_proj.weight_scale_2", 0, 0),
        ("nvfp4_modelopt", "down_proj.weight_scale_2", 0, -1),
        ("nvfp4_modelopt", "down_proj.weight_scale_2", 0, np.inf),
        ("nvfp4_compressed", "down_proj.weight_global_scale", 0, 0),
        ("nvfp4_compressed", "down_proj.weight_global_scale", 0, np.inf),
        ("fp8_block", "down_proj.weight_scale_inv", 0, np.nan),
        ("fp8_block_bf16", "down_proj.weight_scale_inv", 0, 0x7F80),
        ("fp8_block_f16", "down_proj.weight_scale_inv", 0, np.inf),
        ("fp8_block_e8m0", "down_proj.scale", 0, 255),
        ("fp8_channel_compressed", "up_proj.weight_scale", 9, 0x7FC0),
        ("fp8_tensor_modelopt", "up_proj.weight_scale", 0, np.nan),
    ],
)
def test_a_scale_is_no_number_or_has_a_sign(scheme, tail, index, value, tmp_path):
    tiny = Tiny(scheme)
    tiny.poke(tiny.name(2, tail), index, value)
    refuse(tiny, tmp_path, tiny.name(2, tail), "model.safetensors")


@pytest.mark.parametrize(
    "scheme, tail",
    [
        ("bf16", "up_proj.weight"),
        ("mxfp4_v4", "up_proj.weight"),
        ("mxfp4_v4", "down_proj.scale"),
        ("nvfp4_modelopt", "gate_proj.weight"),
        ("nvfp4_modelopt", "gate_proj.weight_scale"),
        ("nvfp4_modelopt", "gate_proj.weight_scale_2"),
        ("fp8_block", "down_proj.weight"),
        ("fp8_block", "down_proj.weight_scale_inv"),
        ("fp8_channel_compressed", "down_proj.weight_scale"),
    ],
)
def test_wrong_shape(scheme, tail, tmp_path):
    tiny = Tiny(scheme, hidden=256, inter=288)
    old = tiny.tensors[tiny.name(1, tail)]
    data = np.concatenate([old.data.reshape(1) if old.data.ndim == 0 else old.data] * 2)
    tiny.tensors[tiny.name(1, tail)] = Raw(old.dtype, data)
    refuse(tiny, tmp_path, tiny.name(1, tail), str(list(data.shape)))


def test_swapped_dimensions(tmp_path):
    """down stored as [inter, hidden]: the number of bytes is right, the shape is not."""
    tiny = Tiny()
    old = tiny.tensors[tiny.name(0, "down_proj.weight")]
    tiny.tensors[tiny.name(0, "down_proj.weight")] = Raw("BF16", old.data.T.copy())
    refuse(tiny, tmp_path, tiny.name(0, "down_proj.weight"), "[64, 96]", "[96, 64]")


@pytest.mark.parametrize(
    "scheme, tail, dtype, item",
    [
        ("bf16", "up_proj.weight", "F16", np.uint16),
        ("bf16", "up_proj.weight", "F32", np.float32),
        ("mxfp4_v4", "up_proj.scale", "F8_E4M3", np.uint8),
        ("fp8_block", "up_proj.weight", "U8", np.uint8),
        ("nvfp4_modelopt", "up_proj.weight_scale", "U8", np.uint8),
        ("nvfp4_modelopt", "up_proj.weight_scale_2", "F64", np.float64),
        ("fp8_block", "up_proj.weight_scale_inv", "I32", np.int32),
    ],
)
def test_wrong_dtype(scheme, tail, dtype, item, tmp_path):
    tiny = Tiny(scheme)
    old = tiny.tensors[tiny.name(1, tail)]
    tiny.tensors[tiny.name(1, tail)] = Raw(dtype, old.data.astype(item))
    refuse(tiny, tmp_path, ".experts.1.up_proj.weight", dtype, "known format")


def test_nvfp4_without_its_second_scale(tmp_path):
    tiny = Tiny("nvfp4_compressed")
    for name in [n for n in tiny.tensors if n.endswith("global_scale")]:
        del tiny.tensors[name]
    refuse(tiny, tmp_path, "known format", "multiplier F32")


def test_quantized_without_any_scale(tmp_path):
    tiny = Tiny("fp8_block")
    for name in [n for n in tiny.tensors if n.endswith("weight_scale_inv")]:
        del tiny.tensors[name]
    refuse(tiny, tmp_path, "known format", "F8_E4M3")


def test_mxfp8_is_refused_by_name(tmp_path):
    tiny = Tiny("fp8_block", hidden=128, inter=128)
    for name in tiny.tensors:
        if name.endswith("weight_scale_inv"):
            tiny.tensors[name] = Raw("F8_E8M0", np.full((128, 4), 120, np.uint8))
    refuse(tiny, tmp_path, "MXFP8", "weight_scale_inv")


def test_blocks_of_a_strange_size(tmp_path):
    tiny = Tiny("fp8_block", hidden=480, inter=480)
    for name in tiny.tensors:
        if name.endswith("weight_scale_inv"):
            tiny.tensors[name] = Raw("F32", np.ones((3, 3), np.float32))  # blocks of 160
    refuse(tiny, tmp_path, "weight_scale_inv", "[3, 3]")


def test_two_formats_in_one_layer_name_both_experts(tmp_path):
    tiny = Tiny("fp8_channel_compressed", hidden=256, inter=256)
    for p in ("gate_proj", "up_proj", "down_proj"):
        tiny.tensors[tiny.name(2, f"{p}.weight_scale")] = Raw("BF16", np.full((2, 2), 0x3F80, np.uint16))
    refuse(
        tiny,
        tmp_path,
        tiny.name(0, "gate_proj.weight"),
        tiny.name(2, "gate_proj.weight"),
        "fp8_row",
        "one format in layer 0",
    )


def test_truncated_file(tmp_path):
    Tiny().save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refuse_folder(tmp_path, str(path), "bytes")


def test_file_truncated_after_it_was_opened(tmp_path):
    Tiny().save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*expected at least .* truncated"):
        list(checkpoint.experts(0))


def test_missing_shard(tmp_path):
    Tiny().save(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refuse_folder(tmp_path, "model-00002-of-00003.safetensors")


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path):
    tiny = Tiny("nvfp4_modelopt")
    tiny.save(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    refuse_folder(tmp_path, "model.norm.weight", "model-00002-of-00002.safetensors", "index")


def test_shard_holds_a_tensor_that_the_index_lacks(tmp_path):
    Tiny().save(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"].pop("lm_head.weight")
    (tmp_path / INDEX).write_text(json.dumps(index))
    refuse_folder(tmp_path, "lm_head.weight", "model-00002-of-00002.safetensors", "index")


def test_a_tensor_in_two_shards(tmp_path):
    tiny = Tiny()
    tiny.save(tmp_path, shards=2)
    name = tiny.name(0, "gate_proj.weight")
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    second = {n: t for n, t in tiny.tensors.items() if where[n] != where[name]} | {name: tiny.tensors[name]}
    write_file(tmp_path / "model-00002-of-00002.safetensors", second)
    refuse_folder(tmp_path, name, "model-00002-of-00002.safetensors", "assigns")


def test_index_with_a_name_twice(tmp_path):
    Tiny().save(tmp_path, shards=2)
    text = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(
        text.replace(
            '"weight_map": {', '"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors",'
        )
    )
    refuse_folder(tmp_path, "lm_head.weight", INDEX)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        '{"weight_map": {"a": "b.bin"}}',
    ],
)
def test_index_that_is_none(text, tmp_path):
    Tiny().save(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(text)
    refuse_folder(tmp_path, INDEX)


def test_several_files_and_no_index(tmp_path):
    Tiny().save(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    refuse_folder(tmp_path, INDEX, "2 safetensors files")


def test_no_file_at_all(tmp_path):
    Tiny().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuse_folder(tmp_path, "model.safetensors")


def test_no_folder_and_no_config(tmp_path):
    refuse_folder(tmp_path / "nothing", "nothing")
    refuse_folder(tmp_path, "config.json")


def test_single_file_under_another_name(tmp_path):
    Tiny().save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    Checkpoint.open(tmp_path).check()


def test_questions_about_what_is_not_there(tmp_path):
    Tiny().save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    for ask, word in (
        (lambda: checkpoint.expert(0, 3), "0 to 2"),
        (lambda: checkpoint.expert(5, 0), "layer 5"),
        (lambda: checkpoint.shard_of("x"), "x"),
        (lambda: checkpoint.read("y"), "y"),
    ):
        with pytest.raises(CheckpointError, match=word):
            ask()
