"""Several ranks, and several API servers: the same tokens as one rank, and the counters of every rank."""

import json
import urllib.error
import urllib.request

import pytest

from moet.checkpoint import LocalSource
from moet.pack import Pack
from moet.pack.packer import pack
from tests.e2e.engine_run import PROMPTS, invert, run
from tests.e2e.engine_server import serving
from tests.generators import write_deepseek_v3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "source").mkdir()
    write_deepseek_v3(folder / "source")
    pack(LocalSource(folder / "source"), folder / "pack")
    return folder / "pack"


def complete(server, prompt):
    body = {"model": "pack", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["token_ids"]


def test_two_ranks_and_two_api_servers(packed, tmp_path):
    alone = run([{"name": "one", "model": str(packed), "engine": {"additional_config": {"moet": {}}}}], tmp_path / "one")["one"]
    vllm = ("--tensor-parallel-size", "2", "--api-server-count", "2")
    with serving(packed, "--ram", "50%", vllm=vllm, folder=tmp_path) as server:
        assert [complete(server, prompt) for prompt in PROMPTS] == alone["ids"]
        for rank in ("0", "1"):
            assert server.metric("moet:layers_total", rank=rank) > 0
            assert server.metric("moet:disk_read_bytes_total", rank=rank) > 0
        for _ in range(8):  # whichever API server answers
            assert json.loads(server.get("/v1/models"))["data"][0]["moet"]["precision"] == "base"
            assert server.metric("moet:info", precision="base") == 1
        rows = Pack.open(packed).layers[1].rows("base")
        there = rows.geometry.slice(1, 2).segments[0][0] + 10  # bytes that rank 1 alone reads
        spoilt = [rows.offset(expert) + there for expert in range(rows.experts)]
        for offset in spoilt:
            invert(rows.path, offset)
        with pytest.raises(urllib.error.HTTPError) as failed:
            for i in range(20):  # some rows are in the arena, whole
                complete(server, f"another {i}")
        assert "an expert could not be read" in failed.value.read().decode()
        for offset in spoilt:
            invert(rows.path, offset)
        assert complete(server, PROMPTS[0]) == alone["ids"][0]
        assert server.stop() == 0
    assert {p.name.split("-")[-1] for p in (tmp_path / "moet" / "heat").iterdir()} == {"0of2.json", "1of2.json"}
