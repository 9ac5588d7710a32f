"""`vllm serve` over the demo's pack on the GPU, in processes of its own: metrics, the model card, and a damaged row that fails a request and not the server."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
from moet.checkpoint import LocalSource
from moet.pack import Pack
from moet.pack.packer import pack

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
LAYER = 3


class Server:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        plugin = folder / "site" / "moet-0.dist-info"   # what installing moet leaves for vLLM to find it by
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: moet\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nmoet = moet.engine.vllm:register\n")
        path = os.pathsep.join([str(plugin.parent), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings = {"gpu_percent": 25, "ram_percent": 30, "heat_dir": str(folder / "heat")}
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder / "pack"), "--served-model-name", "demo", "--host", "127.0.0.1",
                   "--port", str(self.port), "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--gpu-memory-utilization", "0.3",
                   "--shutdown-timeout", "10", "--compilation-config", '{"mode": 0}', "--kernel-config", '{"enable_jit_warmup": false}', "--additional-config", json.dumps({"moet": settings})]  # fmt: skip
        self.log = folder / "server.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"server did not start: {self.log.read_text()[-6000:]}")
            time.sleep(0.5)

    def get(self, path: str) -> str:
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10).read().decode()

    def healthy(self) -> bool:
        try:
            self.get("/health")
            return True
        except OSError:
            return False

    def complete(self, prompt: str) -> dict:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]

    def metric(self, name: str) -> float:
        return sum(float(v) for v in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE))

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, request):
    if request.getfixturevalue("emulated"):
        pytest.skip("vLLM's GPU worker needs a GPU")
    folder = tmp_path_factory.mktemp("server")
    pack(LocalSource(ROOT / "demo" / "model"), folder / "pack", native=False)
    server = Server(folder)
    server.folder = folder
    yield server
    server.kill()


def invert_rows(folder: Path, layer: int) -> None:
    """One byte of every row of a layer, and back when called again."""
    rows = Pack.open(folder / "pack").layers[layer].rows("base")
    with open(rows.path, "r+b") as file:
        for expert in range(rows.experts):
            file.seek(rows.data_offset + expert * rows.geometry.row_bytes + 100)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0xFF]))


def test_answers_metrics_and_the_card(server):
    first = server.complete("Hello world, this is a test of paging")
    assert len(first["token_ids"]) == 16 and first["finish_reason"] == "length"
    assert server.complete("Hello world, this is a test of paging")["token_ids"] == first["token_ids"]
    time.sleep(1.5)   # counters are read once a second
    assert server.metric("moet:gpu_fetched_bytes_total") > 0 and server.metric("moet:gpu_steps_total") > 0
    assert 0.2 < server.metric("moet:gpu_coverage") <= 0.26
    card = json.loads(server.get("/v1/models"))["data"][0]["moet"]
    assert card["precision"] == "base" and card["activations"] == "int15"


def test_a_damaged_row_cannot_be_read_fails_the_request_and_not_the_server(server):
    prompts = [f"Number {n} of the prompts that reach other experts" for n in range(8)]
    before = [server.complete(p)["token_ids"] for p in prompts]
    invert_rows(server.folder, LAYER)
    try:
        failed = 0
        for p, expected in zip(prompts, before, strict=True):
            try:
                assert server.complete(p)["token_ids"] == expected   # its rows were in RAM, or in slots
            except urllib.error.HTTPError as e:
                failed += 1
                assert e.code == 500 and f"layer {LAYER}" in e.read().decode()
        assert failed > 0
        assert server.healthy()
    finally:
        invert_rows(server.folder, LAYER)
    assert [server.complete(p)["token_ids"] for p in prompts] == before
    assert server.metric("moet:checksum_failures_total") > 0


def test_a_stop_keeps_the_heat(server):
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    assert list((server.folder / "heat").glob("*.json"))
    assert not list(Path("/dev/shm").glob(f"moet-{os.getuid()}-{server.process.pid}-*"))
