"""What every committed result carries: machine, versions, commit, date, raw samples, and claims whose `held` is computed here."""

import datetime
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import moet

ROOT = Path(__file__).parents[1]
PACKAGES = ("numpy", "torch", "transformers", "vllm", "safetensors", "llama-cpp-python")


@dataclass(frozen=True)
class Claim:
    """One measured statement. `target` None: reported only, nothing to hold."""

    id: str
    what: str
    value: float
    unit: str
    target: float | None = None
    sense: Literal[">=", "<=", "=="] = ">="

    @property
    def held(self) -> bool | None:
        if self.target is None:
            return None
        return {">=": self.value >= self.target, "<=": self.value <= self.target, "==": self.value == self.target}[self.sense]

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "what": self.what, "value": self.value, "unit": self.unit,
            "target": self.target, "sense": self.sense, "held": self.held,
        }  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor model, cores that this process may use, memory in GiB, kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())
    flags = next((x.split(":", 1)[1].split() for x in lines if x.startswith("flags")), [])
    memory = int(next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemTotal")).split()[1])
    return {
        "cpu": model,
        "isa": [f for f in ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16") if f in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 20), 1),
        "kernel": platform.release().split("-")[0],
    }


def versions() -> dict[str, str]:
    found = {"moet": moet.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the working tree, with `+` if tracked sources differ from it."""
    run = lambda *a: subprocess.run(["git", "-C", str(ROOT), *a], capture_output=True, text=True).stdout.strip()
    dirty = run("status", "--porcelain", "--untracked-files=no", "--", "src", "native", "benchmarks", "demo")
    return run("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")


def write(path: Path, claims: list[Claim], samples: dict[str, Any], mode: str, **more: Any) -> dict[str, Any]:
    """Writes docs/results/NAME.json and returns what it wrote. `mode`: precision and activation format, as in `base, fp32`."""
    result = {
        "date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine(), "versions": versions(), "mode": mode,
        "claims": [c.as_dict() for c in claims], **more, "samples": samples,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result
