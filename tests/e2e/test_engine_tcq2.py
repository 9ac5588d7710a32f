"""A pack with tcq2 base rows in vLLM, against stock vLLM on a checkpoint that holds the same values: they have 8 significant bits, so BF16 stores
them exactly."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moet.checkpoint import LocalSource
from moet.layout import dequantize_row
from moet.pack import Pack
from moet.pack.packer import pack
from tests.cpu.tcq2_cases import Tcq2Rounding
from tests.e2e.engine_run import run
from tests.generators import write_qwen3_moe

pytestmark = pytest.mark.slow


def moet(**settings) -> dict:
    return {"additional_config": {"moet": settings}}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tcq2")
    source, packed = folder / "source", folder / "pack"
    source.mkdir()
    write_qwen3_moe(source, experts=16, top_k=4, inter=80, scheme="bf16")
    pack(LocalSource(source), packed, encoder=Tcq2Rounding())
    write_values(source, Pack.open(packed))
    steps = [{"name": "stock", "model": str(source)}]
    steps += [{"name": f"base-{percent}", "model": str(packed), "engine": moet(ram_percent=percent)} for percent in (25, 100)]
    steps += [{"name": "native", "model": str(packed), "engine": moet(precision="native")}]
    return run(steps, folder / "run")


def write_values(checkpoint: Path, opened: Pack) -> None:
    """Replaces the experts of a BF16 checkpoint by what the rows of a pack mean."""
    for shard in checkpoint.glob("*.safetensors"):
        tensors = load_file(shard)
        for index, layer in opened.layers.items():
            for expert in range(layer.experts):
                geometry = layer.base.geometry
                row = np.fromfile(layer.base.path, np.uint8, geometry.row_bytes, offset=layer.base.offset(expert))
                for name, values in zip(("gate_proj", "up_proj", "down_proj"), dequantize_row(geometry, row), strict=True):
                    key = f"model.layers.{index}.mlp.experts.{expert}.{name}.weight"
                    if key in tensors:
                        tensors[key] = torch.from_numpy(values).bfloat16()
                        assert np.array_equal(tensors[key].float().numpy(), values)
        save_file(tensors, shard, {"format": "pt"})


def test_base_is_stock_vllm_on_its_values(answers):
    stock, base = answers["stock"], answers["base-100"]
    assert base["ids"] == stock["ids"]
    worst = max(abs(x - y) for a, b in zip(base["logprobs"], stock["logprobs"], strict=True) for x, y in zip(a, b, strict=True))
    assert worst < 1e-3


def test_the_budget_does_not_change_a_bit(answers):
    few, all_rows = answers["base-25"], answers["base-100"]
    assert (few["ids"], few["logprobs"]) == (all_rows["ids"], all_rows["logprobs"])
    assert few["counters"]["evictions"] > 0


def test_base_is_not_native(answers):
    assert answers["native"]["logprobs"] != answers["base-100"]["logprobs"]
