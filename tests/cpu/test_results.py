"""Committed results: well formed, honest about what held, and what the README shows."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_held_follows_from_value_and_target(path):
    record = load(ROOT / "benchmarks" / "record.py")
    result = json.loads(path.read_text())
    assert {"date", "commit", "machine", "versions", "mode", "claims", "samples"} <= set(result), path
    for c in result["claims"]:
        claim = record.Claim(c["id"], c["what"], c["value"], c["unit"], c["target"], c["sense"])
        assert c["held"] == claim.held, f"{path.name}: {c['id']}"


RENDER = load(ROOT / "scripts" / "render_results.py")


@pytest.mark.parametrize("page", RENDER.TABLES)
def test_pages_show_the_committed_results(page):
    text = (ROOT / page).read_text()
    assert RENDER.render(page, text) == text, "run python scripts/render_results.py"


def test_headlines_exist():
    assert set(RENDER.HEADLINES) <= {c["id"] for c in RENDER.claims()}
