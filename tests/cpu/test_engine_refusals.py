"""What cannot be served is refused before anything is loaded, naming the setting, the reason and the way out; other models are left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moet.checkpoint import LocalSource
from moet.pack.packer import pack
from tests.generators import write_qwen3_moe

PACK, SOURCE, DENSE = "PACK", "SOURCE", "DENSE"  # replaced by the folders
CASES = {  # name -> (model, EngineArgs, what the error must say; "" for none)
    "pack": (PACK, {}, ""),
    "pack with settings": (PACK, {"additional_config": {"moet": {"ram_percent": 50}}}, ""),
    "checkpoint without moet": (SOURCE, {}, ""),
    "checkpoint": (SOURCE, {"additional_config": {"moet": {}}}, ""),
    "tensor parallel": (PACK, {"tensor_parallel_size": 2}, ""),
    "float16": (PACK, {"dtype": "float16"}, "--dtype float16: experts take float32 or bfloat16; use --dtype bfloat16"),
    "expert parallel": (PACK, {"enable_expert_parallel": True, "tensor_parallel_size": 2}, "--enable-expert-parallel"),
    "data parallel": (PACK, {"data_parallel_size": 2}, "--data-parallel-size 2"),
    "pipeline parallel": (PACK, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    "lora": (PACK, {"enable_lora": True}, "--enable-lora"),
    "dummy weights": (PACK, {"load_format": "dummy"}, "--load-format dummy"),
    "online quantization": (SOURCE, {"additional_config": {"moet": {}}, "quantization": "fp8_per_tensor"}, "--quantization-config"),
    "no native rows": (PACK, {"additional_config": {"moet": {"precision": "native"}}}, "pack again with --native"),
    "checkpoint that does not fit": (SOURCE, {"additional_config": {"moet": {"ram_percent": 50}}}, "needs room for all its experts"),
    "too little memory": (PACK, {"additional_config": {"moet": {"ram_percent": 1}}}, "arena budget: expected at least"),
    "unknown setting": (PACK, {"additional_config": {"moet": {"ram": 1}}}, "moet.ram: unknown setting"),
    "settings that are none": (PACK, {"additional_config": {"moet": 3}}, "expected an object of settings, found 3"),
    "other additional config": (PACK, {"additional_config": {"moet": {}, "other": 1}}, "expected moet alone, found other too"),
    "no folder": ("org/name", {"additional_config": {"moet": {}}}, "`moet serve org/name` fetches and packs a Hub id"),
    "two at once": (PACK, {"dtype": "float16", "enable_lora": True}, "use --dtype bfloat16; --enable-lora"),
}
PROGRAM = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import get_quantization_config
out = {}
for name, (model, arguments) in json.load(open(sys.argv[1])).items():
    try:
        config = EngineArgs(model=model, max_model_len=256, kv_cache_memory_bytes=1 << 26, **arguments).create_engine_config()
        run = config.additional_config
        out[name] = {"error": "", "run": type(run).__name__, "loader": config.load_config.load_format, "method": config.model_config.quantization,
                     "fp8": get_quantization_config("fp8").__name__, "hash": config.compute_hash()}
    except Exception as e:
        out[name] = {"error": f"{type(e).__name__}: {e}"}
json.dump(out, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    folders = {name: folder / name.lower() for name in (PACK, SOURCE)}
    folders[SOURCE].mkdir()
    write_qwen3_moe(folders[SOURCE])
    pack(LocalSource(folders[SOURCE]), folders[PACK], native=False)
    # the stock case first: nothing of moet may be there yet
    order = ["checkpoint without moet", *(n for n in CASES if n != "checkpoint without moet")]
    plan = {name: (str(folders.get(CASES[name][0], CASES[name][0])), CASES[name][1]) for name in order}
    (folder / "plan.json").write_text(json.dumps(plan))
    env = {**os.environ, "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "0", "VLLM_NO_USAGE_STATS": "1",
           "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0", "TMPDIR": str(folder)}  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(folder / "plan.json"), str(folder / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (folder / "out.json").exists(), done.stderr[-3000:]
    assert list(Path(folder).glob("moet-*")) == [], "a run folder outlived its process"
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_case(found, name):
    expected = CASES[name][2]
    assert expected in found[name]["error"] if expected else found[name]["error"] == ""


def test_a_model_that_is_not_moets_meets_stock_vllm(found):
    stock = found["checkpoint without moet"]
    assert stock["run"] == "dict" and stock["loader"] == "auto" and stock["method"] is None and stock["fp8"] == "Fp8Config"


def test_moets_models_meet_its_classes(found):
    for name in ("pack", "checkpoint"):
        assert found[name]["run"] == "Run" and found[name]["loader"] == "moet" and found[name]["method"] == "moet"
    assert found["pack"]["fp8"] == "MoetFp8Config"


def test_settings_do_not_change_the_key_of_compiled_code(found):
    assert found["pack"]["hash"] == found["pack with settings"]["hash"]
