"""Starts a server as a user would, asks it, reads its metrics, stops it."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Server:
    """A running OpenAI-compatible server on this machine."""

    url: str
    model: str
    process: subprocess.Popen
    log: Path

    def get(self, path: str) -> str:
        return urllib.request.urlopen(self.url + path, timeout=30).read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=600))

    def metrics(self, prefix: str = "moet:") -> dict[str, float]:
        """Sums of all samples whose name starts with `prefix`, by name, over their labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            match = re.match(rf"({re.escape(prefix)}\w*)(?:\{{.*\}})? (\S+)$", line)
            if match:
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy completion: {"text", "token_ids", "logprobs"}; logprobs of the chosen tokens as the server printed them."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 5, "return_token_ids": True, **more}
        choice = self.post("/v1/completions", body)["choices"][0]
        return {
            "text": choice["text"],
            "prompt_token_ids": choice.get("prompt_token_ids"),
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "top_logprobs": choice["logprobs"]["top_logprobs"],
        }


@contextlib.contextmanager
def serve(command: list[str], log: Path, env: dict[str, str] | None = None, port: int | None = None) -> Iterator[Server]:
    """Runs `command` (its port is ours to choose and already in it), waits until it is healthy, and stops its whole process group.

    Raises RuntimeError with the end of the log if the server leaves or is not ready in START_SECONDS.
    """
    assert port is not None
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"server left with {process.returncode}: ...{log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"server not ready in {START_SECONDS} s: ...{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/health", timeout=2).read()
                break
            time.sleep(0.5)
        server = Server(url, "", process, log)
        server.model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def moet(
    model: Path | str, *options: str, log: Path, vllm: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[Server]:
    """`moet serve MODEL options -- vllm`, on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "moet", "serve", str(model), *options, "--", "--port", str(port), *vllm]
    return serve(command, log, env, port)


def stock(model: Path | str, *vllm: str, log: Path, env: dict[str, str] | None = None) -> contextlib.AbstractContextManager[Server]:
    """`vllm serve MODEL` with every plugin off: the reference that moet is compared with."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port), *vllm]
    return serve(command, log, {"VLLM_PLUGINS": "", **(env or {})}, port)
