"""`moet inspect`: the facts of a checkpoint and of the pack made from it, against the files themselves."""

import json
import subprocess
import sys

import pytest

from tests.cpu.checkpoint_writer import Tiny
from tests.generators.schemes import Raw


def moet(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "moet", *map(str, arguments)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint whose last two layers have another format, and its pack."""
    root = tmp_path_factory.mktemp("inspect")
    tiny = Tiny(("nvfp4_modelopt", "bf16", "bf16"), hidden=128, inter=96, experts=4)
    tiny.save(root / "src", shards=2)
    done = moet("pack", root / "src", root / "dst", "--no-calibrate")
    assert done.returncode == 0, done.stderr
    return root, tiny


def test_checkpoint_as_json(made):
    root, tiny = made
    found = json.loads(moet("inspect", root / "src", "--json").stdout)
    experts = sum(t.data.nbytes for name, t in tiny.tensors.items() if ".experts." in name)
    dense = sum(t.data.nbytes for name, t in tiny.tensors.items() if ".experts." not in name)
    assert (found["expert_bytes"], found["dense_bytes"]) == (experts, dense)
    assert (found["architecture"], found["hidden"], found["top_k"]) == ("Qwen3MoeForCausalLM", 128, 2)
    assert (found["tensors"], found["shards"]) == (len(tiny.tensors), 2)
    assert [(g["layers"], g["format"], g["scale_dtype"]) for g in found["groups"]] == [
        ([0], "nvfp4", "F8_E4M3"),
        ([1, 2], "bf16", ""),
    ]


def test_estimate_is_the_packs_own_size(made):
    """Row files have a header of 4096 bytes each, which the estimate leaves out."""
    root, _ = made
    estimate = json.loads(moet("inspect", root / "src", "--json").stdout)["pack"]
    for kind in ("base", "native"):
        real = sum(p.stat().st_size - 4096 for p in (root / "dst" / "experts").glob(f"{kind}-*.safetensors"))
        assert estimate[f"{kind}_bytes"] == real > 0


def test_pack_as_json(made):
    root, _ = made
    found = json.loads(moet("inspect", root / "dst", "--json").stdout)
    stored = json.loads((root / "dst" / "moet.json").read_text())
    assert found["kind"] == "pack" and found["precisions"] == ["base", "native"]
    assert found["fingerprint"] == stored["fingerprint"] and found["report"] == stored["report"]
    assert [(g["layers"], g["format"]) for g in found["groups"]] == [([0], "nvfp4"), ([1, 2], "bf16")]


def test_for_people(made):
    root, _ = made
    for folder, words in (
        (
            "src",
            ("checkpoint of Qwen3MoeForCausalLM", "nvfp4", "bf16", "1-2", "every one claimed", "as a pack"),
        ),
        (
            "dst",
            (
                "pack of Qwen3MoeForCausalLM",
                "precisions base, native",
                "bits a weight",
                "sign bias",
                "fingerprint",
            ),
        ),
    ):
        run = moet("inspect", root / folder)
        assert run.returncode == 0, run.stderr
        assert all(word in run.stdout for word in words), run.stdout


def test_damage_is_one_line_and_an_exit_code(tmp_path):
    tiny = Tiny()
    tiny.tensors[tiny.name(0, "up_proj.zero_point")] = Raw(
        "U8", tiny.tensors[tiny.name(0, "up_proj.weight")].data.view("u1")
    )
    tiny.save(tmp_path)
    run = moet("inspect", tmp_path)
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.count("\n") == 1 and tiny.name(0, "up_proj.zero_point") in run.stderr
