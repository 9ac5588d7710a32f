"""The arithmetic against what torch counts, and against the models' published sizes."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate_cases import some_windows
from torch.utils.flop_counter import FlopCounterMode

from moet.calibrate import TOKENS
from moet.calibrate.codebooks import codebook_of
from moet.calibrate.encode import encode_matrix
from moet.calibrate.estimate import (
    GLM_5_2,
    H200,
    V4_FLASH,
    Sizes,
    Speeds,
    layer_seconds,
    memory,
    model_seconds,
)
from moet.calibrate.layer import LayerWork
from moet.calibrate.routing import record
from moet.checkpoint import Checkpoint
from moet.forward import Decoder
from tests import generators as g

TIMED = Path(__file__).parents[3] / "docs" / "results" / "calibrate-glm-5.2.json"
ONE = Speeds(*[1.0] * 6)
IN_PLACE = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}
"""torch counts the other form only."""


def test_products_are_those_that_torch_counts(tmp_path, pool):
    """With flops = 1 the seconds of a stage are its operations. Factors are not counted by torch."""
    g.write_mixtral(tmp_path, layers=1, hidden=64, inter=96, experts=4)
    windows = some_windows(count=64, length=32)
    decoder = Decoder.open(Checkpoint.open(tmp_path))
    states = decoder.embed(windows.ids)
    other = dataclasses.replace(states, hidden=states.hidden * (1 + 1e-6))  # routes alike
    layer, found = decoder.checkpoint.spec.layer(0), []
    with decoder.layer(0, experts=False) as module:
        for s in (states, other):
            found.append(record(decoder, module, s, 0, 4)[0])
    work = LayerWork(decoder.checkpoint, layer, decoder.checkpoint.spec.activation, *found)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        for _ in work.run(functools.partial(encode_matrix, codebook_of("sym2")), 2, pool):
            pass
    tokens = windows.ids.numel()
    expected = layer_seconds(Sizes(64, 96, 4, 2, 1, other=0), ONE, tokens)
    total = expected.statistics + expected.feedback + expected.answers
    assert counter.get_total_flops() == pytest.approx(total, rel=0.05)


def test_published_models():
    assert GLM_5_2.weights == pytest.approx(724.8e9, rel=1e-3)
    assert V4_FLASH.weights == pytest.approx(277.0e9, rel=1e-3)


def test_seconds_add_up_and_scale():
    speeds = H200
    layer = layer_seconds(GLM_5_2, speeds)
    assert model_seconds(GLM_5_2, speeds) == pytest.approx(75 * layer.total, rel=0.01)
    assert layer.search == pytest.approx(GLM_5_2.weights / 75 / speeds.search)
    twice = layer_seconds(GLM_5_2, speeds, 2 * TOKENS)
    assert twice.answers == pytest.approx(2 * layer.answers) and twice.factors == layer.factors
    for field in dataclasses.fields(speeds):
        slower = dataclasses.replace(speeds, **{field.name: getattr(speeds, field.name) / 2})
        assert model_seconds(GLM_5_2, slower) > model_seconds(GLM_5_2, speeds)


def test_a_24_gb_gpu_is_enough():
    for sizes in (GLM_5_2, V4_FLASH):
        found = memory(sizes, 9 << 30)
        assert found.device < 20 << 30
        assert found.host < 32 << 30 and found.disk < 17 << 30


def test_an_h200_is_as_fast_as_it_was_timed():
    """`other` and `answers` are bounded by more than products; they are small beside the search."""
    result = json.loads(TIMED.read_text())
    timed = result["samples"]
    seconds, factors = timed["seconds"], sum(timed["factors_seconds"].values())
    layer = layer_seconds(GLM_5_2, H200)
    assert layer.decode == pytest.approx(seconds["natives"], rel=0.05)
    assert layer.statistics == pytest.approx(seconds["statistics of gate and up"] + seconds["statistics of down"], rel=0.05)
    assert layer.factors == pytest.approx(factors, rel=0.05)
    assert layer.search == pytest.approx(seconds["encode gate and up"] + seconds["encode down"] - factors, rel=0.05)
    assert layer.rows == pytest.approx(seconds["rows"], rel=0.05)
    assert layer.total - layer.read == pytest.approx(sum(seconds.values()), rel=0.05)  # nothing is read there
    assert GLM_5_2.other == pytest.approx(result["shape"]["other_weights"], rel=0.01)
    assert 0.8 < timed["peak_device_bytes"] / memory(GLM_5_2, 9 << 30).device < 1
