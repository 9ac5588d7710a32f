"""Packs with tcq2 base rows: written, opened, verified, inspected, and repaired as far as a checkpoint alone allows."""

import json
import shutil

import numpy as np
import pytest
from pack_cases import SOURCES, contents, copy, pack_local
from tcq2_cases import Tcq2Rounding, encode
from test_pack_cli import moet

from moet.checkpoint import Checkpoint, LocalSource
from moet.errors import PackError
from moet.layout import dequantize_row
from moet.layout.reference import dequantize
from moet.pack import Pack
from moet.pack.repair import repair
from moet.pack.verify import verify


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    SOURCES["mxfp4"](root / "src")
    pack_local(root / "src", root / "dst", encoder=Tcq2Rounding())
    return root


@pytest.fixture
def pack(made, tmp_path):
    return copy(made / "dst", tmp_path / "pack")


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["mxfp4 with biases", "bf16"])
def test_rows_mean_what_was_encoded(name, tmp_path):
    SOURCES[name](tmp_path / "src")
    pack_local(tmp_path / "src", tmp_path / "dst", encoder=Tcq2Rounding(), native=False)
    opened, checkpoint = Pack.open(tmp_path / "dst"), Checkpoint.open(tmp_path / "src")
    assert opened.manifest.codebook.scale == "ue5m3" and opened.manifest.scheme == "tcq2-rtn"
    for index, layer in list(opened.layers.items())[:2]:
        geometry = layer.base.geometry
        assert geometry.format == "tcq2"
        row = np.fromfile(layer.base.path, np.uint8, geometry.row_bytes, offset=layer.base.offset(1))
        source = checkpoint.expert(index, 1)
        for values, matrix in zip(dequantize_row(geometry, row), (source.gate, source.up, source.down), strict=True):
            assert np.array_equal(values, dequantize(encode(matrix)[0]))
    assert opened.manifest.report.gate.error < 0.36, "sym2 gives 0.39 on Gaussian weights"
    assert verify(tmp_path / "dst").ok


def test_a_flipped_bit_is_named(pack):
    rows = Pack.open(pack).layers[3].base
    flip(rows.path, rows.offset(5) + 100)
    (fault,) = verify(pack).faults
    assert (fault.layer, fault.expert, fault.rows) == (3, 5, "base") and "w13 tile 0" in fault.problem


def test_repair_mends_all_but_base_rows_and_says_which(made, pack):
    layers = Pack.open(pack).layers
    base, native = layers[3].base, layers[2].native
    flip(base.path, base.offset(5) + 100)
    flip(base.path, 40)
    flip(native.path, native.offset(1))
    (pack / "config.json").unlink()
    layers[4].base.path.unlink()
    done = repair(pack, LocalSource(made / "src"))
    assert len(done.before.faults) == 5
    assert [(f.kind, f.layer, f.expert) for f in done.left] == [("row", 3, 5), ("row file", 4, None)]
    assert {"config.json", "experts/native-002.safetensors", "experts/base-003.safetensors"} == set(done.rewritten)
    assert "tcq2-rtn" in done.way and "another copy" in done.way
    assert verify(pack).faults == done.left
    flip(base.path, base.offset(5) + 100)
    shutil.copy(made / "dst" / "experts" / layers[4].base.path.name, layers[4].base.path)
    assert contents(pack) == contents(made / "dst")


def test_a_lost_manifest_is_not_made_up(made, pack):
    before = contents(pack)
    (pack / "moet.json").unlink()
    with pytest.raises(PackError, match="tcq2 rows, which the checkpoint alone does not give"):
        repair(pack, LocalSource(made / "src"))
    shutil.copy(made / "dst" / "moet.json", pack)
    assert contents(pack) == before


def test_commands(made, pack):
    told = moet("inspect", pack)
    assert told.returncode == 0 and "tcq2" in told.stdout and "scheme tcq2-rtn" in told.stdout
    found = json.loads(moet("inspect", pack, "--json").stdout)
    assert found["scheme"] == "tcq2-rtn" and found["calibration"] is None
    assert {group["base_format"] for group in found["groups"]} == {"tcq2"}
    base = Pack.open(pack).layers[0].base
    flip(base.path, base.offset(0))
    bad = moet("verify", pack, "--repair", made / "src")
    assert bad.returncode == 1 and "not repaired: experts/base-000.safetensors, layer 0, expert 0" in bad.stdout
    report = json.loads(moet("verify", pack, "--repair", made / "src", "--json").stdout)
    assert not report["ok"] and [f["expert"] for f in report["left"]] == [0]
