"""DeviceRuntime.forward on random layers, against float64 within the bounds of its roundings (dequantized.py), and against itself, bit for bit, with scratch and output full of NaN."""

import pytest
import torch
from dequantized import check, decode, layer
from expert_layers import Layers, open_runtime, registration
from random_layers import ACTIVATIONS, Batch, Case, batch, draw, rows

from moet.kernels.expert_mlp import cuda, reference
from moet.layout import FORMATS, RowGeometry
from moet.moe.device import DeviceRuntime
from moet.moe.scan import LARGE

SEEDS, EMULATED_SEEDS = 14, 1   # of every format; the routings take turns by seed


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What forward leaves out stays NaN."""
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, torch.nan))


def poison(runtime: DeviceRuntime) -> None:
    """NaN in all scratch that holds no state between calls."""
    for name in ("_act", "_y"):
        getattr(runtime, name).view(torch.uint8).fill_(0xFF)


def computed_with_planes(case: Case, scan: bool) -> bool:
    large = scan and case.tokens * case.top_k >= LARGE * case.experts
    return not large and case.format in getattr(cuda, "INTEGER_FORMATS", ())


def check_case(case: Case, emulated: bool) -> None:
    device = "cpu" if emulated else "cuda"
    layers, call = Layers({0: case.geometry}, case.experts, ACTIVATIONS[case.activation], {0: rows(case)}), batch(case, device)
    experts = {e: decode(case.geometry, torch.from_numpy(row).to(device), case.rank, case.world) for e, row in enumerate(layers.rows[0])}
    with layers.store(register=registration(emulated), rank=case.rank, world=case.world) as store:
        runtime = open_runtime(store, layers, case.top_k, emulated, ring_rows=3)
        slots = int(case.coverage * sum(n.slot_bytes * n.rows for n in runtime.needs))
        runtime.allocate(0 if case.coverage == 1 else max(slots, runtime.gpu_bytes_minimum()))
        runtime.arm(True)
        for scan in (False, True):
            results = []
            for _ in range(2):
                poison(runtime)
                results.append(runtime.forward(0, call.x, call.weights, call.ids, call.kv_slots, scan))
            compare(case, scan, call, experts, results)
        runtime.close()


def compare(case: Case, scan: bool, call: Batch, experts: dict, results: list[torch.Tensor]) -> None:
    live = torch.ones_like(call.alone) if call.kv_slots is None else call.kv_slots >= 0
    ids = call.ids.masked_fill(~live[:, None], -1)
    x = call.x.masked_fill((call.alone | ~live)[:, None], 0)
    expected = layer(experts, x, call.weights, ids, ACTIVATIONS[case.activation], computed_with_planes(case, scan))
    found, again = results
    assert torch.equal(found.view(torch.int16), again.view(torch.int16)) or case.values in ("nan", "inf"), (case, "other bits in a second run")
    assert torch.equal(found[~call.alone].view(torch.int16), again[~call.alone].view(torch.int16)), (case, "other bits in a second run")
    check(found, expected, (case, scan), ~call.alone)
    for token in torch.nonzero(call.alone & expected.routed).flatten().tolist():
        assert not torch.isfinite(found[token]).all(), (case, scan, "a token that is not finite must not give one that is")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("format", FORMATS)
def test_random_layers(format, seed, emulated):
    if emulated and seed >= EMULATED_SEEDS:
        pytest.skip("minutes on the CPU")
    check_case(draw(format, seed + (FORMATS.index(format) if emulated else 0), emulated), emulated)


@pytest.mark.parametrize("format", FORMATS)
def test_the_bounds_are_those_of_the_reference(format, emulated):
    """dequantized.py computes what reference.py does."""
    geometry = RowGeometry(format, 96, 96, True)
    layers = Layers({0: geometry}, 1, ACTIVATIONS["oai"])
    x = torch.randn(5, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for rank in range(3):
        expert = decode(geometry, torch.from_numpy(layers.rows[0][0]), rank, 3)
        ids, weights = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
        found = layer({0: expert}, x, weights, ids, layers.activation, False).out
        assert torch.allclose(found, torch.from_numpy(reference.expert_mlp(geometry, layers.rows[0][0], x.numpy(), layers.activation, rank=rank, world=3)), rtol=1e-11, atol=1e-11)
