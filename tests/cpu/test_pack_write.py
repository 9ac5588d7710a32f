"""What a pack holds: the source's experts bit for bit, the other tensors byte for byte, files that any
safetensors reader opens."""

import json
import subprocess
import sys

import numpy as np
import pytest
from pack_cases import SOURCES, contents, copy, pack_local
from safetensors import safe_open

from moet.checkpoint import Checkpoint
from moet.layout import check_row, crc32c, unpack_row
from moet.pack import Pack


@pytest.fixture(scope="module", params=SOURCES)
def packed(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("pack")
    SOURCES[request.param](root / "src")
    outcome = pack_local(root / "src", root / "dst")
    return root / "src", root / "dst", outcome


def test_native_rows_are_the_source_bit_for_bit(packed):
    src, dst, _ = packed
    pack, checkpoint = Pack.open(dst), Checkpoint.open(src)
    assert list(pack.layers) == [layer.index for layer in checkpoint.spec.layers]
    for index, layer in pack.layers.items():
        rows = layer.rows("native")
        assert rows.geometry.format == checkpoint.native_format(index)
        for weights in checkpoint.experts(index):
            row = np.fromfile(
                rows.path, np.uint8, rows.geometry.row_bytes, offset=rows.offset(weights.expert)
            )
            assert crc32c(row) == rows.checksums[weights.expert]
            for got, want in zip(
                unpack_row(rows.geometry, row), (weights.gate, weights.up, weights.down), strict=True
            ):
                assert np.array_equal(got.codes, want.codes)
                assert want.scales is None or np.array_equal(
                    got.scales.view(np.uint8), want.scales.view(np.uint8)
                )
                assert want.bias is None or np.array_equal(got.bias.view(np.uint8), want.bias.view(np.uint8))
                assert np.float32(got.multiplier) == np.float32(want.multiplier)
            assert rows.scale_dtype == weights.gate.scale_dtype


def test_safetensors_reader_opens_every_file(packed):
    _, dst, _ = packed
    pack = Pack.open(dst)
    for layer in pack.layers.values():
        for rows in (layer.base, layer.native):
            with safe_open(rows.path, "numpy") as file:
                tensor = file.get_tensor("rows")
            assert tensor.shape == (layer.experts, rows.geometry.row_bytes) and tensor.dtype == np.uint8
            assert rows.data_offset % 4096 == 0 and rows.geometry.row_bytes % 4096 == 0
            stored = np.fromfile(rows.path, np.uint8, offset=rows.data_offset)
            assert np.array_equal(tensor.reshape(-1), stored)
            assert all(check_row(rows.geometry, row) == [] for row in tensor)


def test_other_tensors_are_byte_identical(packed):
    src, dst, _ = packed
    source, result = Checkpoint.open(src), json.loads((dst / "model.safetensors.index.json").read_text())
    dense = [name for shard in source.shards for name in source.dense_names(shard)]
    assert sorted(result["weight_map"]) == sorted(dense)
    assert result["metadata"]["total_size"] == sum(source.tensor_info(name).nbytes for name in dense)
    for file in set(result["weight_map"].values()):
        copied = {name for name, where in result["weight_map"].items() if where == file}
        raw = (dst / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert header.keys() - {"__metadata__"} == copied
        for name in copied:
            begin, end = header[name]["data_offsets"]
            info = source.tensor_info(name)
            assert (header[name]["dtype"], tuple(header[name]["shape"])) == (info.dtype, info.shape)
            assert raw[8 + length + begin : 8 + length + end] == source.read(name).tobytes(), name
        with safe_open(dst / file, "pt") as opened:
            assert set(opened.keys()) == copied


def test_card(packed):
    src, dst, outcome = packed
    spec, pack = Checkpoint.open(src).spec, Pack.open(dst)
    assert (pack.hidden, pack.top_k, pack.activation) == (spec.hidden, spec.top_k, spec.activation)
    assert pack.fingerprint == outcome.manifest.fingerprint and len(pack.fingerprint) == 64
    assert [(x.index, x.prefix, x.experts, x.inter, x.mtp) for x in pack.layers.values()] == [
        (x.index, x.prefix, x.experts, x.inter, x.mtp) for x in spec.layers
    ]
    report = pack.manifest.report
    assert report.weights == sum(3 * x.experts * x.inter * spec.hidden for x in spec.layers)
    assert 2.25 < report.base_bits < 2.25 + 8 * 8192 / (3 * spec.hidden * spec.layers[0].inter) + 0.2
    assert not (dst / ".moet").exists()


def test_config_gains_only_our_entry(packed):
    src, dst, _ = packed
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (src, dst))
    place = after["quantization_config"]
    assert place.pop("moet") == {"format": 2}
    if "quantization_config" not in before:
        assert after.pop("quantization_config") == {"quant_method": "moet"}
    assert after == before
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (src / name).exists() == (dst / name).exists()
        if (src / name).exists():
            assert (src / name).read_bytes() == (dst / name).read_bytes()


def test_same_bytes_whatever_the_workers_the_folder_and_the_time(packed, tmp_path):
    src, dst, _ = packed
    pack_local(copy(src, tmp_path / "elsewhere"), tmp_path / "again", workers=1)
    assert contents(tmp_path / "again") == contents(dst)
    pack_local(src, tmp_path / "more", workers=7)
    assert contents(tmp_path / "more") == contents(dst)


def test_no_native(packed, tmp_path):
    src, dst, outcome = packed
    lean = pack_local(src, tmp_path / "lean", native=False).manifest
    assert not list((tmp_path / "lean").rglob("native-*")) and lean.report.native_bytes == 0
    assert lean.fingerprint == outcome.manifest.fingerprint
    assert [layer.base for layer in lean.layers] == [layer.base for layer in outcome.manifest.layers]


def test_hf_quant_config_stays_in_charge(tmp_path):
    SOURCES["bf16"](tmp_path / "src")
    (tmp_path / "src" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    pack_local(tmp_path / "src", tmp_path / "dst")
    for name in ("config.json", "hf_quant_config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()


def test_what_is_copied(tmp_path):
    src = tmp_path / "src"
    SOURCES["bf16"](src)
    for name in (
        "encoding/encode.py",
        "chat_template.jinja",
        "LICENSE",
        ".cache/x.json",
        "inference/run.py",
        "README.md",
        "old.bin",
    ):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text(name)
    pack_local(src, tmp_path / "dst")
    copied = set(contents(tmp_path / "dst"))
    assert copied >= {"encoding/encode.py", "chat_template.jinja", "LICENSE"}
    assert not copied & {".cache/x.json", "inference/run.py", "README.md", "old.bin"}


def test_packing_imports_no_torch():
    code = "import sys, moet.pack.packer, moet.pack.repair, moet.cli.pack, moet.cli.verify; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
