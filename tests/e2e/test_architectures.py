"""Every architecture and format of the table: packed, verified, compared expert by expert with values that moet did not compute.

Two rows are served here too; `python scripts/architectures.py` serves all that vLLM's CPU backend can run.
"""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.numpy import load_file

from moet.checkpoint import Checkpoint
from moet.checkpoint.dequantize import dequantize_expert
from tests.e2e.arch import serve, table
from tests.e2e.arch.compare import pack_and_compare
from tests.e2e.arch.rows import FIXTURES, ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_packed_rows_equal_the_checkpoint(row: Row, tmp_path: Path) -> None:
    """Native rows: the checkpoint's values, bit for bit. Base rows: those of an independent quantization, bit for bit."""
    truth = row.make(tmp_path / "checkpoint")
    result = pack_and_compare(tmp_path / "checkpoint", truth, tmp_path / "pack")
    assert result.verified
    assert result.experts == len(truth.experts) > 0
    assert not result.wrong, "\n".join(result.wrong[:10])
    assert (
        0.05 < result.base_error < 0.2
    )  # normal weights at 2.25 bits: 0.12; the lower bound notices a comparison with itself


@pytest.mark.parametrize("name", sorted(p.parts[-3] for p in FIXTURES.glob("*/tool/made_by.json")))
def test_exporters_dequantize_to_the_same_values(name: str) -> None:
    """The tool's own float32 dequantization. It multiplies two scales in float32 before the value, so two roundings of 2^-24
    each. compressed-tensors decompresses to BF16, whose steps are 2^-8."""
    expected = load_file(FIXTURES / name / "tool" / "dequantized.safetensors")
    checkpoint = Checkpoint.open(FIXTURES / name)
    assert expected
    tolerance = 2.0**-8 if "llmcompressor" in name else 2.0**-22
    for layer in checkpoint.spec.layers:
        for expert in checkpoint.experts(layer.index):
            for projection, value in zip(("gate", "up", "down"), dequantize_expert(expert), strict=True):
                want = expected[f"{layer.index}.{expert.expert}.{projection}"]
                np.testing.assert_allclose(value[: len(want)], want, rtol=tolerance, atol=0)


def test_every_fixture_has_a_row() -> None:
    assert {p.parts[-3] for p in FIXTURES.glob("*/tool/made_by.json")} == {
        row.id for row in ROWS if row.made_by != "generator"
    }
    size = sum(p.stat().st_size for p in FIXTURES.rglob("*") if p.is_file())
    assert size < 2_000_000, f"tests/fixtures: expected less than 2 MB, found {size} bytes"


def test_served_as_transformers_computes_it(tmp_path: Path) -> None:
    """vLLM with moet, 60 % of the rows in RAM: native against transformers on the dequantized checkpoint, base against
    transformers with the base rows' values for experts. Two rows (attention of both kinds) in one vLLM process."""
    pytest.importorskip("vllm")
    rows = [row for row in ROWS if row.ci_serves]
    made = {row.id: row.make(tmp_path / row.id / "checkpoint") for row in rows}
    packs = {name: tmp_path / name / "pack" for name in made}
    compared = {name: pack_and_compare(truth.root, truth, packs[name]) for name, truth in made.items()}
    answers = serve.serve(packs, tmp_path / "answers")
    for row in rows:
        answer = answers[row.id]
        assert isinstance(answer, dict), answer
        for precision, experts in (("native", None), ("base", compared[row.id].base)):
            folder = made[row.id].write_dequantized(tmp_path / row.id / precision, experts)
            agreement = serve.compare(folder, answer[precision])
            assert agreement.holds(row.tolerance), (row.id, precision, agreement)
        other = serve.compare(tmp_path / row.id / "native", answer["base"])
        assert not other.holds(row.tolerance), f"{row.id}: base answers pass as native ones, so nothing was compared: {other}"


def test_the_page_is_the_json() -> None:
    """docs/architectures.md is what `scripts/architectures.py --render` makes of docs/results/architectures.json."""
    assert table.PAGE.read_text() == table.render(json.loads(table.RESULTS.read_text()))
