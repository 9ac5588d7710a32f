"""`moet eval compare` and `report`, from the command line to the result file."""

import json
import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from moet.cli.main import build_app
from moet.errors import EvalError
from tests.cpu.eval.conftest import TEXT

SMALL = ["--short", "12", "--short-bytes", "64", "--long", "2", "--long-bytes", "300", "--decode", "2", "--answers", "3", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "en.txt").write_text(TEXT)
    rows = [{"text": f"Zeile {i}: Füße und Straßen, " * 3, "language": "de"} for i in range(12)]
    (folder / "more.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"--text=prose={folder / 'en.txt'}", f"--text={folder / 'more.jsonl'}"]


def run(*arguments):
    return CliRunner().invoke(build_app("eval"), ["eval", *map(str, arguments)])


@pytest.fixture(scope="module")
def results(folders, texts, tmp_path_factory):
    """base and native against the dequantized reference."""
    out = tmp_path_factory.mktemp("results")
    for precision in ("base", "native"):
        outcome = run("compare", folders["plain"], folders["pack"], "--precision", precision, *texts, *SMALL, "--out", out / f"{precision}.json")
        assert outcome.exit_code == 0, outcome.output
    return {p: (out / f"{p}.json", json.loads((out / f"{p}.json").read_text())) for p in ("base", "native")}


def test_native_is_at_the_noise_floor(results):
    for path in results["native"][1]["paths"].values():
        assert path["at_noise_floor"] and path["kl"]["value"] < 1e-10 and path["agreement"]["value"] == 1.0
        assert path["floor_kl"] < 1e-10


def test_base_is_not(results):
    for path in results["base"][1]["paths"].values():
        assert not path["at_noise_floor"] and path["kl"]["value"] > 1e-3
    assert results["base"][1]["paths"]["prefill-short"]["kl"]["low"] > 1e-3


def test_what_a_result_holds(results):
    r = results["base"][1]
    assert set(r["paths"]) == {"prefill-short", "prefill-long", "decode"}
    assert r["mode"] == "base, float32 activations against native, float32 activations"
    assert r["candidate"]["kind"] == "pack" and len(r["candidate"]["fingerprint"]) == 64
    assert r["versions"]["torch"] and r["machine"]["cores"] and r["date"] and r["parameters"]["short"] == 12
    assert set(r["paths"]["prefill-short"]["domains"]) == {"prose", "de"}
    assert {"kl.prefill-short", "top1.decode", "bpb.prefill-long", "greedy.equal"} <= {c["id"] for c in r["claims"]}
    assert all(set(c) == {"id", "what", "value", "unit", "target", "sense", "held"} for c in r["claims"])
    assert any("COULD NOT HAVE CAUGHT" in words for words in r["power"])


def test_the_numbers_are_those_of_the_samples(results):
    r = results["base"][1]
    path, windows = r["paths"]["prefill-short"], r["samples"]["prefill-short"]["windows"]
    assert path["windows"] == len(windows) == 12
    tokens, size = sum(w["tokens"] for w in windows), sum(w["bytes"] for w in windows)
    assert path["kl"]["value"] == pytest.approx(sum(w["kl"] for w in windows) / tokens)
    assert path["bits_per_byte"]["candidate"] == pytest.approx(sum(w["cand_nll"] for w in windows) / math.log(2) / size)
    assert path["perplexity"]["reference"] == pytest.approx(math.exp(sum(w["ref_nll"] for w in windows) / tokens))
    assert len(r["samples"]["answers"]) == 3


def test_lists_are_a_lower_bound(folders, texts, results, tmp_path):
    outcome = run("compare", folders["plain"], folders["pack"], *texts, *SMALL, "--decode", 0, "--answers", 0, "--top", 20, "--out", tmp_path / "top.json")
    assert outcome.exit_code == 0, outcome.output
    listed, whole = json.loads((tmp_path / "top.json").read_text())["paths"], results["base"][1]["paths"]
    for name, path in listed.items():
        assert path["kl"]["value"] < whole[name]["kl"]["value"] and "lower bound" in path["vocabulary"]
        assert path["agreement"] == whole[name]["agreement"]
        assert path["bits_per_byte"]["candidate"] == pytest.approx(whole[name]["bits_per_byte"]["candidate"], rel=1e-9)


def test_one_layer_at_a_time(folders, texts, results, tmp_path):
    """The numbers of models that are in memory whole; no decode path and no answers."""
    outcome = run("compare", folders["source"], folders["pack"], *texts, *SMALL, "--stream", "--out", tmp_path / "r.json")
    assert outcome.exit_code == 0, outcome.output
    r = json.loads((tmp_path / "r.json").read_text())
    assert set(r["paths"]) == {"prefill-short", "prefill-long"} and r["answers"] is None
    for name, path in r["paths"].items():
        assert path["kl"]["value"] == pytest.approx(results["base"][1]["paths"][name]["kl"]["value"], rel=1e-4)
        assert path["floor_kl"] < 1e-10


def test_a_gate_that_does_not_hold(folders, texts, tmp_path):
    few = ["--short", 6, "--short-bytes", 64, "--long", 0, "--decode", 0, "--answers", 0]
    for limit, code in ((1e-6, 1), (1e6, 0)):
        outcome = run("compare", folders["source"], folders["pack"], *texts, *few, "--max-kl", limit, "--out", tmp_path / "r.json")
        (claim,) = [c for c in json.loads((tmp_path / "r.json").read_text())["claims"] if c["id"] == "kl.prefill-short"]
        assert outcome.exit_code == code and claim["held"] is (code == 0)


def test_report(results):
    outcome = run("report", results["base"][0], results["native"][0], "--markdown")
    assert outcome.exit_code == 0, outcome.output
    kl = results["base"][1]["paths"]["prefill-short"]["kl"]["value"]
    assert f"{kl:.4f}" in outcome.output and "the difference is noise" in outcome.output
    for table in outcome.output.split("###"):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1


def test_pictures(results, tmp_path):
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        assert run("report", results["base"][0], results["native"][0], "--pictures", tmp_path / folder).exit_code == 0
    pictures = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert pictures == ["domains.svg", "kl.svg", "partings.svg"]
    assert all((tmp_path / "a" / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in pictures)


def test_two_different_models(folders, texts, tmp_path):
    from tests.generators import write_olmoe

    (tmp_path / "other").mkdir()
    write_olmoe(tmp_path / "other")
    outcome = run("compare", tmp_path / "other", folders["pack"], *texts, "--out", tmp_path / "r.json")
    assert isinstance(outcome.exception, EvalError) and "differ in their routed experts only" in str(outcome.exception)
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["compare", "nowhere", "pack"], "expected http://HOST:PORT"),
        (["compare", "http://127.0.0.1:9", "pack"], "127.0.0.1:9/v1/models: expected an answer"),
        (["compare", "source", "pack", "--short-bytes", "3"], "--short-bytes: expected at least 16"),
        (["compare", "source", "pack", "--short", "0", "--long", "0"], "expected windows to score or prompts"),
        (["compare", "source", "pack", "--long-bytes", "90000"], "make --long-bytes or --short-bytes smaller"),
        (["compare", "source", "pack", "--key-file", "nowhere"], "--key-file nowhere: expected a readable file"),
        (["report", "config"], "expected a result of `moet eval"),
    ],
)
def test_clear_errors(folders, texts, tmp_path, arguments, message):
    (tmp_path / "long.txt").write_text("word " * 20_000)
    names = {**{k: str(v) for k, v in folders.items()}, "config": str(folders["source"] / "config.json")}
    arguments = [names.get(a, a) for a in arguments]
    more = [*texts, f"--text={tmp_path / 'long.txt'}", "--out", tmp_path / "r.json"] if arguments[0] == "compare" else []
    outcome = run(*arguments, *more)
    assert isinstance(outcome.exception, EvalError) and message in str(outcome.exception), outcome.output


def test_measuring_needs_no_server():
    """`measure` and `stats` import neither vLLM nor HTTP nor lm-eval."""
    code = "import sys, moet.eval.measure, moet.eval.stats; print([m for m in ('vllm', 'httpx', 'lm_eval', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
