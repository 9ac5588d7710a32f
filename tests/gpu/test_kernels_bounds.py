"""DeviceRuntime.forward on random layers, against float64 within the bounds of its roundings (dequantized.py), and against itself, bit for bit, with scratch and output full of NaN."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from dequantized import check, decode, layer
from expert_layers import Layers, poison_scratch
from random_layers import ACTIVATIONS, Batch, Case, batch, pairs_of_large, draw, rows

from moet.kernels.expert_mlp import reference
from moet.layout import FORMATS, RowGeometry
from moet.moe.device import DeviceRuntime

SEEDS, REDUCED_SEEDS = 28, 4   # of every format; the routings take turns


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What forward leaves out stays NaN."""
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))


def check_case(case: Case, opened: Callable[..., DeviceRuntime], emulated: bool) -> None:
    device = "cpu" if emulated else "cuda"
    layers, call = Layers({0: case.geometry}, case.experts, ACTIVATIONS[case.activation], {0: rows(case)}), batch(case, device)
    experts = {e: decode(case.geometry, torch.from_numpy(row).to(device)).part(case.geometry, case.rank, case.world) for e, row in enumerate(layers.rows[0])}
    slots = int(case.coverage * case.experts) * case.geometry.row_bytes
    runtime = opened(layers, slots, case.top_k, case.rank, case.world, least=True, ring_rows=3)
    for scan in (False, True):
        results = []
        for _ in range(2):
            poison_scratch(runtime)
            results.append(runtime.forward(0, call.x, call.weights, call.ids, call.kv_slots, scan))
        compare(case, scan, pairs_of_large(runtime, case.format, case.tokens, case.experts, case.top_k, scan), call, experts, results)


def compare(case: Case, scan: bool, many: int, call: Batch, experts: dict, results: list[torch.Tensor]) -> None:
    live = torch.ones_like(call.alone) if call.kv_slots is None else call.kv_slots >= 0
    ids = call.ids.masked_fill(~live[:, None], -1)
    x = call.x.masked_fill((call.alone | ~live)[:, None], 0)
    expected = layer(experts, x, call.weights, ids, ACTIVATIONS[case.activation], many)
    found, again = results
    assert torch.equal(found.view(torch.int16), again.view(torch.int16)) or case.values in ("nan", "inf"), (case, "other bits in a second run")
    assert torch.equal(found[~call.alone].view(torch.int16), again[~call.alone].view(torch.int16)), (case, "other bits in a second run")
    check(found, expected, (case, scan), ~call.alone)
    for token in torch.nonzero(call.alone & expected.routed).flatten().tolist():
        assert not torch.isfinite(found[token]).all(), (case, scan, "a token that is not finite must not give one that is")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("format", FORMATS)
def test_random_layers(format, seed, opened, emulated, reduced):
    if reduced and seed >= REDUCED_SEEDS:
        pytest.skip("minutes under compute-sanitizer")
    check_case(draw(format, seed, emulated or reduced), opened, emulated)


@pytest.mark.parametrize("format", FORMATS)
def test_the_bounds_are_those_of_the_reference(format, emulated):
    """dequantized.py computes what reference.py does."""
    geometry = RowGeometry(format, 96, 96, True)
    layers = Layers({0: geometry}, 1, ACTIVATIONS["oai"])
    x = torch.randn(5, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for rank in range(3):
        expert = decode(geometry, torch.from_numpy(layers.rows[0][0])).part(geometry, rank, 3)
        ids, weights = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
        found = layer({0: expert}, x, weights, ids, layers.activation, 0).out
        assert torch.allclose(found, torch.from_numpy(reference.expert_mlp(geometry, layers.rows[0][0], x.numpy(), layers.activation, rank=rank, world=3)), rtol=1e-11, atol=1e-11)


def without(matrix: torch.Tensor, column: int) -> torch.Tensor:
    out = matrix.clone()
    out[:, column] = 0
    return out


def test_the_bounds_find_one_lost_column_of_a_thousand():
    """And a scale of one block that is off by an eighth; the right result, rounded once, they pass."""
    geometry = RowGeometry("tcq2", 1024, 1024, False)
    layers = Layers({0: geometry}, 1)
    x, ids, weights = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    expert = decode(geometry, torch.from_numpy(layers.rows[0][0]))
    scaled = expert.down.clone()
    scaled[:64, 32:64] *= 1.125
    for many in (5, 0):
        expected = layer({0: expert}, x, weights, ids, layers.activation, many)
        check(expected.out.bfloat16(), expected)
        for wrong in ({"gate": without(expert.gate, 70)}, {"down": without(expert.down, 70)}, {"down": scaled}):
            found = layer({0: dataclasses.replace(expert, **wrong)}, x, weights, ids, layers.activation, many).out
            with pytest.raises(AssertionError, match="standard deviations|largest error"):
                check(found.bfloat16(), expected)
