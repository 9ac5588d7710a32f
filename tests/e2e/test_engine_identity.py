"""vLLM with moet, in process: what is answered depends on the precision alone; `native` is what vLLM answers without moet."""

from pathlib import Path

import pytest

from moet.checkpoint import LocalSource
from moet.pack.packer import pack
from tests.e2e.engine_run import STOCK, run
from tests.generators import write_deepseek_v3, write_qwen3_moe

pytestmark = pytest.mark.slow
WRITERS = {
    "qwen3-moe": lambda out: write_qwen3_moe(out, experts=64, top_k=4, inter=64, layers=3),
    "deepseek-v3": lambda out: write_deepseek_v3(out, experts=64, top_k=4, inter=64),
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
BUDGETS = (5, 25, 100)


def moet(**settings) -> dict:
    return {"additional_config": {"moet": settings}}


@pytest.fixture(scope="module", params=WRITERS)
def model(request, tmp_path_factory) -> tuple[str, Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    source, packed = folder / "source", folder / "pack"
    source.mkdir()
    WRITERS[request.param](source)
    pack(LocalSource(source), packed)
    return request.param, source, packed


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory) -> dict:
    name, source, packed = model
    folder = tmp_path_factory.mktemp("run")
    steps = [{"name": "stock", "model": str(source), "engine": STOCK}]
    for precision in ("native", "base"):
        for percent in BUDGETS:
            steps.append({"name": f"{precision}-{percent}", "model": str(packed), "engine": moet(precision=precision, ram_percent=percent)})
        steps.append({"name": f"{precision}-again", "model": str(packed), "engine": moet(precision=precision, ram_percent=25)})
        steps.append({"name": f"{precision}-direct", "model": str(source), "engine": moet(precision=precision)})
    if name == "deepseek-v3":
        for percent in BUDGETS[:2]:
            steps.append({"name": f"base-mtp-{percent}", "model": str(packed), "engine": moet(ram_percent=percent) | MTP})
    steps.append({"name": "base-bf16-5", "model": str(packed), "engine": moet(ram_percent=5) | {"dtype": "bfloat16"}})
    steps.append({"name": "base-bf16-100", "model": str(packed), "engine": moet() | {"dtype": "bfloat16"}})
    return run(steps, folder)


def same(a: dict, b: dict) -> bool:
    return a["ids"] == b["ids"] and a["logprobs"] == b["logprobs"]


def test_native_is_stock_vllm(answers):
    stock, native = answers["stock"], answers["native-100"]
    assert native["ids"] == stock["ids"]
    worst = max(abs(x - y) for a, b in zip(native["logprobs"], stock["logprobs"], strict=True) for x, y in zip(a, b, strict=True))
    assert worst < 1e-3


@pytest.mark.parametrize("precision", ["native", "base"])
def test_the_budget_does_not_change_a_bit(answers, precision):
    for percent in (5, 25):
        found = answers[f"{precision}-{percent}"]
        assert same(found, answers[f"{precision}-100"])
        assert found["counters"]["evictions"] > 0
        assert found["counters"]["arena_bytes"] <= percent / 100 * found["counters"]["bytes_total"]


@pytest.mark.parametrize("precision", ["native", "base"])
def test_a_checkpoint_encoded_at_start_is_its_pack(answers, precision):
    direct = answers[f"{precision}-direct"]
    assert same(direct, answers[f"{precision}-100"])
    assert direct["counters"]["rows_put"] == direct["counters"]["rows_total"] > 0
    assert direct["counters"]["reads"] == 0


@pytest.mark.parametrize("precision", ["native", "base"])
def test_a_restart_is_preheated_and_answers_the_same(answers, precision):
    again = answers[f"{precision}-again"]
    assert same(again, answers[f"{precision}-25"])
    assert again["counters"]["rows_preheated"] > 0


def test_bfloat16_too(answers):
    assert same(answers["base-bf16-5"], answers["base-bf16-100"])
    assert answers["base-bf16-100"]["logprobs"] != answers["base-100"]["logprobs"]


def test_base_is_not_native(answers):
    assert answers["base-100"]["logprobs"] != answers["native-100"]["logprobs"]


def test_nothing_is_asked_for_before_the_first_token(answers):
    for name, found in answers.items():
        if name != "stock":
            assert found["before"]["hits"] == found["before"]["misses"] == 0, name


def test_prefills_are_scans_and_decoding_is_not(answers):
    found = answers["base-25"]["counters"]
    scans, all_rows = found["scan_hits"] + found["scan_misses"], found["hits"] + found["misses"]
    assert 0 < scans < all_rows


def test_the_runtime_closes_with_the_engine(answers):
    assert all(found["open"] == 0 for found in answers.values())


def test_drafting_changes_no_token(answers):
    if "base-mtp-5" not in answers:
        pytest.skip("this model has no MTP layer")
    assert same(answers["base-mtp-5"], answers["base-mtp-25"])
    assert answers["base-mtp-25"]["ids"] == answers["base-25"]["ids"]
    assert answers["base-mtp-25"]["counters"]["layers"] > answers["base-25"]["counters"]["layers"]


def test_a_compiled_engine_answers_the_same(model, answers, tmp_path):
    found = run([{"name": "compiled", "model": str(model[2]), "engine": moet(ram_percent=25) | {"enforce_eager": False}}], tmp_path)["compiled"]
    assert found["before"]["hits"] == found["before"]["misses"] == 0  # its warm-up has run the model
    assert found["ids"] == answers["base-100"]["ids"]


def test_model_runner_v2_answers_the_same(model, answers, tmp_path):
    pytest.importorskip("triton")
    engine = moet(ram_percent=25) | (MTP if model[0] == "deepseek-v3" else {})
    found = run([{"name": "v2", "model": str(model[2]), "engine": engine}], tmp_path, "V2")["v2"]
    assert found["before"]["hits"] == found["before"]["misses"] == 0
    assert found["ids"] == answers["base-100"]["ids"]
