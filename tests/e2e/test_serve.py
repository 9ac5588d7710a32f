"""`moet serve CHECKPOINT`: packs, serves, and is used through OpenAI's own client; then row failures, and how it ends."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")
from moet.config import MoetConfig
from moet.pack import Pack
from tests.e2e.engine_run import invert
from tests.e2e.engine_server import serving
from tests.generators import write_qwen3_moe

GREEDY = {"temperature": 0, "seed": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    source = folder / "tiny"
    source.mkdir()
    write_qwen3_moe(source, experts=16, top_k=4)
    with serving(source, "--ram", "50%", folder=folder) as server:
        server.folder = folder
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def chat(client, text, tokens=16, **more):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], max_tokens=tokens, **GREEDY | more)


def idle(server) -> bool:
    return server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def test_the_model_card_says_the_mode(client):
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert card.model_extra["moet"] == {
        "precision": "base", "activations": MoetConfig().activations, "experts": "pack", "row_format": "sym2", "scheme": "sym2-rtn",
    }  # fmt: skip


def test_chat_with_logprobs(client):
    reply = chat(client, "Hello", logprobs=True, top_logprobs=2)
    assert reply.usage.completion_tokens == 16 and reply.choices[0].finish_reason == "length"
    assert len(reply.choices[0].logprobs.content) == 16
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in reply.choices[0].logprobs.content)


def test_a_stream_says_what_a_reply_says(client):
    whole = chat(client, "Tell me")
    parts = [c.choices[0] for c in chat(client, "Tell me", stream=True) if c.choices]
    assert "".join(p.delta.content or "" for p in parts) == whole.choices[0].message.content
    assert parts[-1].finish_reason == "length"


def test_eight_streams_at_once_say_what_one_alone_says(client, server):
    def ask(i):
        return "".join(c.choices[0].delta.content or "" for c in chat(client, f"Number {i}", 24, stream=True) if c.choices)

    alone = [ask(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert server.wait(lambda: idle(server))


def test_a_cancelled_stream_frees_its_slot(client, server):
    stream = chat(client, "For long", 400, stream=True)
    next(iter(stream))
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    assert server.wait(lambda: idle(server))


def test_a_client_that_disconnects_frees_its_slot(server):
    body = {"model": "tiny", "prompt": "For long", "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    reply = urllib.request.urlopen(request, timeout=60)
    reply.readline()
    assert not idle(server)
    reply.close()
    assert server.wait(lambda: idle(server))


def test_metrics(client, server):
    before = {name: server.metric(name) for name in ("moet:expert_hits_total", "moet:expert_misses_total", "moet:layers_total")}
    chat(client, "Count this", 8)
    assert server.metric("moet:layers_total", rank="0") > before["moet:layers_total"]
    assert server.metric("moet:expert_hits_total") > before["moet:expert_hits_total"]
    assert server.metric("moet:expert_misses_total") > before["moet:expert_misses_total"]
    assert server.metric("moet:expert_evictions_total") > 0
    assert 0 < server.metric("moet:arena_mapped_bytes") <= server.metric("moet:arena_budget_bytes")
    assert server.metric("moet:arena_budget_bytes") == server.metric("moet:rows_bytes") / 2
    assert 0 < server.metric("moet:arena_slots_valid") <= server.metric("moet:arena_slots")
    rows = server.metric("moet:disk_read_rows_total")
    assert server.metric("moet:disk_read_bytes_total") > 0 and rows > 0
    assert server.metric("moet:read_latency_seconds_count") == rows
    (pack,) = (server.folder / "packs" / "packs").glob("tiny-*-base")
    fingerprint = Pack.open(pack).fingerprint
    assert server.metric("moet:info", precision="base", activations=MoetConfig().activations, source="pack", fingerprint=fingerprint, row_format="sym2") == 1


def test_a_row_that_cannot_be_read_fails_its_requests_with_the_reason(client, server):
    good = chat(client, "Please", 8).choices[0].message.content
    (pack,) = (server.folder / "packs" / "packs").glob("tiny-*-base")
    rows = Pack.open(pack).layers[1].rows("base")
    spoilt = [rows.offset(expert) + 100 for expert in range(rows.experts)]
    for offset in spoilt:
        invert(rows.path, offset)
    try:
        with pytest.raises(openai.InternalServerError, match="an expert could not be read.*layer 1"):
            for i in range(20):  # some rows are in the arena, whole
                chat(client, f"Something else {i}", 8)
        with pytest.raises(openai.APIError, match="an expert could not be read"):
            for i in range(20):
                list(chat(client, f"And else {i}", 8, stream=True))
    finally:
        for offset in spoilt:
            invert(rows.path, offset)
    assert chat(client, "Please", 8).choices[0].message.content == good
    assert server.wait(lambda: idle(server))


def test_it_ends_cleanly_and_keeps_the_heat(server):  # the last one
    assert server.stop() == 0
    assert list((server.folder / "moet" / "heat").glob("*-base-0of1.json"))
    assert not list(server.folder.glob("moet-*")), "the run folder is left behind"
