"""`moet eval` against a server: the numbers of vLLM and those of transformers are the same model's; then lm-eval's tasks."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("vllm")
from moet.cli.main import build_app
from moet.errors import EvalError
from moet.eval import measure
from moet.eval.server import Server, ServerTokenizer
from moet.eval.subject import Prompt, open_subject
from tests.cpu.pack_cases import pack_local
from tests.e2e.engine_server import serving
from tests.generators import write_qwen3_moe

pytestmark = pytest.mark.slow
TEXT = "The quick brown fox jumps over the lazy dog and then it sleeps; the router chooses. Füße 🙂. " * 3
NOISE = 1e-9  # nats: vLLM's kernels against transformers', both in float32


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    source = folder / "tiny"
    source.mkdir()
    write_qwen3_moe(source, experts=16, top_k=4).write_dequantized(folder / "plain")
    pack_local(source, folder / "pack")
    with serving(folder / "pack", "--ram", "50%", vllm=("--max-logprobs", "-1"), folder=folder) as server:
        server.folder = folder
        yield server


def run(*arguments):
    outcome = CliRunner().invoke(build_app("eval"), ["eval", *map(str, arguments)])
    if outcome.exception and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome


def test_a_server_against_its_pack(server):
    """The same pack by transformers and by moet's kernels: noise on both paths, by whole vocabularies and by lists."""
    (server.folder / "text.txt").write_text(TEXT * 4)
    small = ["--short", 6, "--short-bytes", 100, "--long", 1, "--long-bytes", 400, "--decode", 2, "--answers", 2, "--max-tokens", 8]
    for top in (0, 20):
        out = server.folder / f"same-{top}.json"
        run("compare", server.folder / "pack", server.url, "--reference-precision", "base", "--text", server.folder / "text.txt", *small, "--top", top, "--out", out)
        r = json.loads(out.read_text())
        assert set(r["paths"]) == {"prefill-short", "prefill-long", "decode"}
        for path in r["paths"].values():
            assert path["kl"]["value"] < NOISE and path["agreement"]["value"] == 1.0
        assert r["answers"]["divergence"]["equal"] == 2
        assert r["candidate"]["mode"].startswith("base, ") and r["candidate"]["details"]["engine"]
        assert r["candidate"]["fingerprint"] == r["reference"]["fingerprint"]
        assert any("byte by byte" in fact for fact in r["sameness"])


def test_a_server_against_the_dequantized_checkpoint(server):
    out = server.folder / "base.json"
    few = ["--short", 6, "--short-bytes", 100, "--long", 0, "--decode", 1, "--answers", 0]
    run("compare", server.folder / "plain", server.url, "--text", server.folder / "text.txt", *few, "--out", out)
    paths = json.loads(out.read_text())["paths"]
    offline = server.folder / "offline.json"
    run("compare", server.folder / "plain", server.folder / "pack", "--text", server.folder / "text.txt", *few, "--out", offline)
    expected = json.loads(offline.read_text())["paths"]["prefill-short"]["kl"]["value"]
    assert paths["prefill-short"]["kl"]["value"] == pytest.approx(expected, rel=1e-3) and expected > 1e-3
    assert "the candidate's own text" in paths["decode"]["measured"]


def test_the_server_s_own_tokenizer(server):
    subject = Server(server.url)
    theirs = ServerTokenizer(subject)
    assert theirs.encode(TEXT) == subject.tokenizer.encode(TEXT) and theirs.decode(theirs.encode(TEXT)) == TEXT
    messages = [{"role": "user", "content": "Hello"}]
    assert theirs.render(messages, None) == subject.tokenizer.render(messages, None)


def test_answers(server):
    subject, offline = Server(server.url), open_subject(str(server.folder / "pack"), precision="base")
    for prompt in (Prompt("p", "d", text="The router"), Prompt("p", "d", messages=({"role": "user", "content": "Hello"},))):
        a, b = subject.answer(prompt, 8), offline.answer(prompt, 8)
        assert a.ids == b.ids and a.stopped == b.stopped and a.drafts is None


def test_less_than_the_vocabulary_is_refused(server):
    subject = Server(server.url)
    with pytest.raises(EvalError, match="found 2 tokens with a probability of 0.7000 together; start vLLM with --max-logprobs -1"):
        subject._whole([{0: math.log(0.5), 7: math.log(0.2)}])
    with pytest.raises(EvalError, match="--max-logprobs"):
        Server(server.url, top=10**6)._prompt([1, 2, 3])
    with pytest.raises(EvalError, match="expected a model other, found"):
        Server(server.url, model="other")


def test_tasks(server, monkeypatch):
    """lm-eval's bits per byte of a text through the server is that of the windows, offline."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    folder = server.folder / "tasks"
    folder.mkdir()
    monkeypatch.setenv("HF_HOME", str(server.folder / "hf"))
    rows = [{"text": f"{i}: {TEXT[: 90 + i]}", "choices": ["fox", "cow"], "answer": i % 2} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / 'rows.jsonl'}\ntest_split: test\n"
    (folder / "bytes.yaml").write_text(
        f'task: tiny_bytes\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{{{text}}}}"\nmetric_list:\n  - metric: bits_per_byte\n'
    )
    (folder / "choice.yaml").write_text(
        f'task: tiny_choice\n{common}output_type: multiple_choice\ndoc_to_text: "{{{{text}}}}"\ndoc_to_choice: "{{{{choices}}}}"\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n"
    )
    out = server.folder / "tasks.json"
    run("tasks", server.url, "--tasks", "tiny_bytes,tiny_choice", "--include", folder, "--out", out)
    r = json.loads(out.read_text())
    assert [s["scores"]["acc"] for s in r["samples"]["tiny_choice"]] and "COULD NOT HAVE CAUGHT" in r["power"][0]
    subject, nats = open_subject(str(server.folder / "pack"), precision="base"), 0.0
    for row in rows:
        ids = subject.tokenizer.start + subject.tokenizer.encode(row["text"])
        logits = next(subject.prefill([ids])).logits(0, len(ids) - 1)
        nats += measure.compare(logits, logits, torch.tensor(ids[1:])).ref_nll.sum()
    expected = measure.bits_per_byte(nats, sum(len(row["text"].encode()) for row in rows))
    assert r["tasks"]["tiny_bytes"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(EvalError, match="found nonsense_task; --include"):
        run("tasks", server.url, "--tasks", "nonsense_task", "--out", out)
    assert run("report", out, out).exit_code == 0
