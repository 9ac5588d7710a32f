"""Results, texts, prompts and servers that are not what they should be: refused by name, before anything is lost."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("httpx")

from moet.cli.eval import compare as command
from moet.cli.eval import report
from moet.errors import EvalError
from moet.eval import prompts, result, server, text
from moet.eval.compare import compare
from moet.eval.pairs import paired
from moet.eval.parameters import Parameters
from moet.eval.subject import Prompt, open_subject
from tests.cpu.eval.conftest import TEXT

BAD_TEXTS = [
    "[]", "5", "null", "{", '{"text": 5}', '{"text": "\\ud800"}', '{"messages": 5}', '{"messages": []}', '{"messages": [{}]}', '{"messages": ["a"]}',
    '{"messages": [{"role": "user", "content": 5}]}', '{"messages": [{"role": "user", "content": "a"}], "tools": 5}',
    '{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', '{"text": "a", "domain": {"x": 1}}', '{"text": "a", "domain": 5}', "[" * 100_000,
]  # fmt: skip
BAD_PROMPTS = ['{"prompt": 5}', '{"prompt": [1]}', '{"messages": "abc"}', '{"messages": {"a": 1}}', '{"prompt": "a", "schema": 5}', '{"prompt": "a", "domain": [1]}', '{"prompt": ""}']


@pytest.mark.parametrize("line", BAD_TEXTS, ids=lambda line: line[:40])
def test_a_bad_line_of_text(line, tmp_path):
    (tmp_path / "t.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(EvalError, match=r"^t\.jsonl:2.*: expected"):
        text.read([str(tmp_path / "t.jsonl")], lambda messages, tools: "rendered")


@pytest.mark.parametrize("line", [*BAD_PROMPTS, *(x for x in BAD_TEXTS if '"text"' not in x)], ids=lambda line: line[:40])
def test_a_bad_prompt(line, tmp_path):
    pytest.importorskip("jsonschema")
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(EvalError, match=r"^p\.jsonl:2.*: expected"):
        prompts.read(tmp_path / "p.jsonl")


@pytest.mark.parametrize("reference", ["http://127.0.0.1:1/x", "#/$defs/nothing", "other.json"])
def test_a_schema_of_elsewhere(reference, tmp_path):
    pytest.importorskip("jsonschema")
    row = {"prompt": "a", "schema": {"$defs": {"a": {"type": "object"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    assert prompts.read(tmp_path / "p.jsonl")[0].schema == row["schema"]
    row["schema"]["properties"]["y"] = {"$ref": reference}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    with pytest.raises(EvalError, match="p.jsonl:1: expected a JSON schema whose references are in it, found"):
        prompts.read(tmp_path / "p.jsonl")


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_row(stream, folders, tmp_path):
    shutil.copytree(folders["pack"], tmp_path / "pack")
    path = tmp_path / "pack" / "experts" / "base-000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(EvalError, match=r"base-000.safetensors, expert \d+: expected checksums that hold"):
        subject = open_subject(str(tmp_path / "pack"), precision="base", stream=stream)
        list(subject.prefill([[1, 2, 3]]))


def test_lines_end_where_json_says(tmp_path):
    (tmp_path / "t.jsonl").write_text('\ufeff{"text": "a\u2028b"}\r\n{"text": "c"}\n', "utf-8")
    assert [d.text for d in text.read([str(tmp_path / "t.jsonl")])] == ["a\u2028b", "c"]


def test_a_chat_template_that_breaks(subjects, monkeypatch):
    tokenizer = subjects["source"].tokenizer
    monkeypatch.setattr(tokenizer.own, "chat_template", "{{ 1 / 0 }}")
    with pytest.raises(EvalError, match="chat template: expected it to take the messages, found: ZeroDivisionError"):
        tokenizer.render([{"role": "user", "content": "a"}], None)


@pytest.mark.parametrize("device", ["", "tpu", "meta", "cuda:77"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_such_device(device, stream, folders):
    with pytest.raises(EvalError, match="--device: expected cpu, or cuda where torch finds a GPU, found"):
        open_subject(str(folders["source"]), precision="native", device=device, stream=stream)


def some(a, b, asked=(), max_kl=None, **parameters):
    documents = [text.Document("t", "t", TEXT)]
    return compare(a, b, documents, list(asked), Parameters(**{"short": 0, "long": 0, **parameters}), lambda *_: lambda: None, max_kl)


def test_a_gate_without_a_measurement_does_not_pass(subjects, folders):
    hello = [Prompt("p:1", "p", "hello")]
    with pytest.raises(EvalError, match="--max-kl: expected windows"):
        some(subjects["source"], subjects["base"], hello, 0.1)
    streamed = [open_subject(str(folders["source"]), precision="native", stream=True) for _ in range(2)]
    with pytest.raises(EvalError, match="--stream gives no answers"):
        some(*streamed, hello)


def test_answers_past_the_models_positions(subjects):
    limit = subjects["source"].card.details["max_model_len"]
    with pytest.raises(EvalError, match=f"p:1: expected prompt and answer to have at most {limit} tokens"):
        some(subjects["source"], subjects["base"], [Prompt("p:1", "p", "hello")], max_tokens=limit)


@pytest.mark.parametrize("where", ["", "file/o.json", "/proc/o.json", "folder", "t.txt"])
def test_out_is_refused_before_measuring(where, folders, tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    pytest.importorskip("jsonschema")
    monkeypatch.setattr("moet.eval.subject.open_subject", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "t.txt").write_text(TEXT)
    with pytest.raises(EvalError, match="--out .*: expected"):
        command("a", "b", text=[f"x={tmp_path / 't.txt'}"], out=tmp_path / where if where else Path())
    assert (tmp_path / "t.txt").read_text() == TEXT and not list(tmp_path.rglob("*.part"))


def test_a_result_that_lacks_something(tmp_path):
    for number, rest in enumerate([{}, {"paths": 5}, {"paths": {"a": {}}, "sameness": [], "power": []}]):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"kind": "compare", "format": result.FORMAT, **rest}))
        with pytest.raises(EvalError, match=f"{number}.json: expected a whole result"):
            report([path])
    for content in (b"", b"\xff", b"[" * 100_000, b'{"kind": "compare"'):
        path.write_bytes(content)
        with pytest.raises(EvalError, match="expected a result of `moet eval`"):
            report([path])


def test_pairs_are_of_the_same_metrics():
    def tasks(*scores: dict[str, float]) -> dict:
        samples = {"a": [{"doc_id": i, "scores": s} for i, s in enumerate(scores)]}
        return {"samples": samples, "versions_of_tasks": {"a": 1}, "parameters": {"loss": 0.02}}

    for other in (tasks({}, {"acc": 1.0}), tasks({"f1": 0.5}, {"f1": 0.3}), tasks({"acc": 1.0, "f1": 1.0}, {"acc": 1.0})):
        with pytest.raises(EvalError, match="a, (acc|f1): expected it of the same documents in x and y, found [12]"):
            paired(("x", tasks({"acc": 1.0}, {"acc": 0.0})), ("y", other))


class Server:
    """Answers a path with (status, body); None: closes the connection."""

    def __init__(self, pages: dict[str, tuple[int, bytes] | None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                page = pages.get(self.path, (404, b"no such page"))
                if page is None:
                    self.close_connection = True
                    return
                self.send_response(page[0])
                self.send_header("Content-Length", str(len(page[1])))
                self.end_headers()
                self.wfile.write(page[1])

            do_POST = do_GET

            def log_message(self, *_) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.http.shutdown()
        self.http.server_close()


MODELS = (200, b'{"data": [{"id": "m"}]}')
TOKENS = (200, b'{"tokens": [1]}')


@pytest.mark.parametrize("page", [(200, b"<html>"), (200, b"\xff\x00"), (200, b"[]"), (200, b'{"data": 5}'), (200, b'{"data": [5]}'), (200, b'{"data": [{}]}'), (500, b"no"), None])
def test_a_server_whose_models_are_no_models(page):
    with Server({"/v1/models": page}) as s, pytest.raises(EvalError, match=f"{s.url}/v1/models: expected"):
        server.Server(s.url)


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b", "http://127.0.0.1:1", "http://127.0.0.1:99999999"])
def test_no_server(url):
    with pytest.raises(EvalError, match="expected"):
        server.Server(url)


@pytest.mark.parametrize("page", [(200, b"<html>"), (200, b"{}"), (200, b'{"choices": [{"text": 5, "message": 5}]}'), (200, b'{"choices": []}'), None])
def test_a_server_that_answers_garbage(page):
    pages = {"/v1/models": MODELS, "/tokenize": TOKENS, "/v1/completions": page, "/v1/chat/completions": page, "/version": None, "/metrics": None}
    with Server(pages) as s:
        subject = server.Server(s.url)
        for prompt in (Prompt("a", "a", "hello"), Prompt("a", "a", messages=({"role": "user", "content": "a"},))):
            with pytest.raises(EvalError, match=f"{s.url}/v1/.*completions: expected"):
                subject.answer(prompt, 4)
        with pytest.raises(EvalError, match=f"{s.url}.*: expected"):
            next(subject.prefill([[1, 2]]))


@pytest.mark.parametrize("token", ["-1", str(1 << 40), '"x"'])
def test_a_server_that_invents_tokens(token):
    row = f'{{"choices": [{{"text": "a", "prompt_logprobs": [null, {{"{token.strip(chr(34))}": {{"logprob": 0.0}}}}]}}]}}'
    with Server({"/v1/models": MODELS, "/tokenize": TOKENS, "/v1/completions": (200, row.encode())}) as s:
        for top in (0, 5):
            with pytest.raises(EvalError, match="expected"):
                next(server.Server(s.url, top=top).prefill([[1, 2]]))
