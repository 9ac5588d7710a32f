"""What a careless or hostile user can hand over: one of moet's own errors, at once, and a way out stays open."""

import json
import os
import subprocess
import sys

import pytest
from pack_cases import SOURCES, contents, copy, pack_local

from moet.checkpoint import Checkpoint
from moet.errors import CheckpointError, PackError
from moet.models import spec_of
from moet.pack import lock
from moet.pack.repair import repair
from moet.pack.verify import verify
from tests.cpu.checkpoint_writer import Tiny

HOSTILE = [True, -1, 1.5, "x", [1], [{}], {"a": 1}, 10**30, float("nan"), [None]]


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    found = []
    for i, make in enumerate(SOURCES.values()):
        make(folder := tmp_path_factory.mktemp(f"config{i}"))
        found.append(json.loads((folder / "config.json").read_text()))
    return found


def test_any_key_of_any_config_with_a_wrong_type(configs):
    """Either the key does not matter, or it is refused by name; counting up to 10**30 would not end."""
    for config in configs:
        for key in config:
            for value in HOSTILE:
                try:
                    spec_of(config | {key: value})
                except CheckpointError as e:
                    assert "config.json" in str(e) and "expected" in str(e)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U8", "shape": [10**4000] * 1000, "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1] * 1000, "data_offsets": [0, 1]},
        {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1], "data_offsets": [0, 10**30]},
    ],
)
def test_headers_that_would_cost_hours(entry, tmp_path):
    Tiny().save(tmp_path)
    head = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"x")
    with pytest.raises(CheckpointError, match="expected"):
        Checkpoint.open(tmp_path)


def test_half_a_surrogate_pair(tmp_path):
    tiny = Tiny()
    tiny.config["_name_or_path"] = "\ud800"
    tiny.save(tmp_path)
    with pytest.raises(CheckpointError, match="config.json.*surrogates"):
        Checkpoint.open(tmp_path)


def test_a_name_that_is_no_utf_8_is_refused_before_any_layer(tmp_path):
    Tiny().save(tmp_path / "src")
    with open(os.fsencode(tmp_path / "src") + b"/tokenizer\xff.json", "w") as file:
        file.write("{}")
    with pytest.raises(CheckpointError, match="printable names in UTF-8"):
        pack_local(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst" / "experts").exists()


@pytest.fixture
def made(tmp_path):
    Tiny(("bf16", "bf16")).save(tmp_path / "src")
    Tiny(("bf16", "bf16"), seed=5).save(tmp_path / "other")
    pack_local(tmp_path / "src", tmp_path / "dst")
    return tmp_path


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_a_repair_from_the_wrong_source_leaves_the_right_one_possible(made, damage):
    pack = copy(made / "dst", made / "pack")
    (pack / "moet.json").unlink() if damage == "lost" else (pack / "moet.json").write_bytes(b"{")
    before = contents(pack)
    with pytest.raises(PackError, match="is not what .* was made from"):
        repair(pack, Checkpoint.open(made / "other").source)
    assert contents(pack) == before and not (pack / ".moet").exists()
    repair(pack, Checkpoint.open(made / "src").source)
    assert contents(pack) == contents(made / "dst")


def test_a_repair_killed_before_its_journal_can_be_repaired(made):
    """moet.json is lost, and there is a work folder with nothing but a lock."""
    pack = copy(made / "dst", made / "pack")
    (pack / "moet.json").unlink()
    (pack / ".moet").mkdir()
    (pack / ".moet" / "lock").write_text("")
    assert [f.kind for f in verify(pack).faults] == ["manifest"]
    repair(pack, Checkpoint.open(made / "src").source)
    assert contents(pack) == contents(made / "dst")


@pytest.mark.parametrize("name", ["moet.json", "config.json", "experts/base-000.safetensors"])
def test_folders_where_files_belong(made, name):
    (made / "dst" / name).unlink()
    (made / "dst" / name).mkdir()
    assert not verify(made / "dst").ok
    with pytest.raises(PackError, match="Is a directory"):
        repair(made / "dst", Checkpoint.open(made / "src").source)


@pytest.mark.parametrize("name", ["journal.json", "lock", "tmp-x"])
def test_folders_in_the_work_folder(made, name):
    (made / "new" / ".moet" / name).mkdir(parents=True)
    with pytest.raises(PackError, match="Is a directory"):
        pack_local(made / "src", made / "new")


def test_a_pack_inside_a_pack(made):
    with pytest.raises(PackError, match="the pack .* around it"):
        pack_local(made / "src", made / "dst" / "inner")


def test_a_second_packer_that_comes_while_the_first_one_leaves(tmp_path, monkeypatch):
    real = os.unlink

    def unlink(path, **options):
        real(path, **options)
        if str(path).endswith("lock"):
            open(path, "w").close()  # the second packer's

    with lock.hold(tmp_path), monkeypatch.context() as m:
        m.setattr(os, "unlink", unlink)
        lock.remove(tmp_path)
    assert (tmp_path / ".moet" / "lock").exists()


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["cache", "prune", "--max-gib", "inf"], 2),
        (["serve", ".", "--cache-gib", "nan", "--print"], 2),
        (["serve", ".", "--cache-gib", "-3", "--print"], 2),
        (["serve", ".", "--prnt"], 2),
        (["pack", "", "dst"], 1),
        (["inspect", b"/no\xff\n\x1b[31mwhere"], 1),
    ],
)
def test_commands(arguments, code, tmp_path):
    command = [sys.executable, "-m", "moet", *arguments]
    run = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=60, check=False)
    assert run.returncode == code and b"Traceback" not in run.stderr, run.stderr
    assert b"\x1b[31m" not in run.stderr


def test_inspect_of_a_path_that_is_no_utf_8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    Tiny().save(folder)
    command = [sys.executable, "-m", "moet", "inspect", folder]
    run = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert run.returncode == 0 and b"checkpoint of" in run.stdout
