"""Imports go one way: a room may import the rooms before it, and only engine/ imports vLLM."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "moet"
ORDER = [
    "errors", "config", "native", "numerics", "models", "checkpoint", "layout", "quantize", "pack", "store", "cache",
    "kernels", "moe", "forward", "calibrate", "recovery", "plan", "engine", "recipes", "bench", "eval", "cli",
]  # fmt: skip
NO_TORCH_BEFORE = "moe"
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the absolute name"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_the_list(path):
    here = room(path)
    if here in ("__init__", "__main__"):
        return
    assert here in ORDER, f"{path}: room {here!r} is not in DESIGN's list"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "moet" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(here), f"{path} ({here}) imports {name}, which comes later"
        assert parts[0] != "vllm" or here == "engine", f"{path} imports {name}: only engine/ may"
        if ORDER.index(here) < ORDER.index(NO_TORCH_BEFORE) and not path.name.startswith("reference"):
            assert parts[0] != "torch", f"{path} imports torch: packing must stay small"


def test_there_are_rooms():
    assert {room(p) for p in FILES} >= {"errors", "config", "checkpoint", "pack", "cli"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 500, f"{path}: one idea a file"
