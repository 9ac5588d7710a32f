"""`moet serve` as a user runs it: a process of its own on a free port, asked over HTTP."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 26), "--enable-prompt-tokens-details")
START_SECONDS = 600


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path

    def get(self, path: str) -> str:
        return urllib.request.urlopen(self.url + path, timeout=30).read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that have all of `labels`."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(float(value) for text, value in found if wanted <= set(text.split(",")))

    def wait(self, what, seconds: float = 60) -> bool:
        """Whether what() becomes true in time."""
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(model: Path, *options: str, vllm: tuple[str, ...] = (), folder: Path) -> Iterator[Server]:
    """Raises RuntimeError with the end of the log if the server leaves or does not become healthy."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "moet", "serve", str(model), *options, "--cache-dir", str(folder / "packs"), "--", "--port", str(port), *VLLM, *vllm]
    log = folder / f"server-{port}.log"
    env = {**os.environ, **ENVIRONMENT, "XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder)}
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)

    def healthy() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"server left with {process.returncode}: ...{log.read_text()[-6000:]}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            server.get("/health")
            return True
        return False

    try:
        if not server.wait(healthy, START_SECONDS):
            raise RuntimeError(f"server not healthy after {START_SECONDS} s: ...{log.read_text()[-6000:]}")
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
