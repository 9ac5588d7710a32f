"""DeviceRuntime.forward against itself, bit for bit: runs, slots, coverage, neighbours, batches, captured graphs."""

import itertools

import numpy as np
import pytest
import torch
from dequantized import check
from expert_layers import Layers, batch, bits, device_of, poison_scratch

from moet.kernels.expert_mlp.launches import COMBINED_TOKENS, MANY
from moet.layout import FORMATS, RowGeometry

EXPERTS, TOP_K = 12, 4


def one_layer(format: str, experts: int = EXPERTS) -> Layers:
    return Layers({0: RowGeometry(format, 192, 96, False)}, experts)


@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
@pytest.mark.parametrize("format", FORMATS)
def test_same_bits_every_run_whatever_scratch_held(format, scan, opened, emulated):
    """Between two equal calls, calls of other tokens and sizes leave other bytes in the scratch."""
    layers = one_layer(format)
    runtime = opened(layers)
    calls = {tokens: batch(tokens, 192, EXPERTS, TOP_K, tokens, device_of(emulated)) for tokens in (1, 6, 33, 90)[: 2 if emulated else 4]}
    first = {tokens: bits(runtime.forward(0, *call, None, scan)) for tokens, call in calls.items()}
    for _ in range(1 if emulated else 20):
        for tokens, call in calls.items():
            poison_scratch(runtime)
            runtime.forward(0, (torch.randn_like(call[0].float()) * 1e4).bfloat16(), call[1], call[2], None, not scan)
            assert bits(runtime.forward(0, *call, None, scan)) == first[tokens], tokens


@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4"])
def test_same_bits_at_every_coverage_and_in_every_slot(format, opened, emulated):
    """Slots, misses and waves change nothing: decode and scan each have one result."""
    layers = one_layer(format, experts := 16 if emulated else 40)
    calls = {tokens: batch(tokens, 192, experts, TOP_K, tokens, device_of(emulated)) for tokens in (1, 5, 16, 60)[: 2 if emulated else 4]}
    expected: dict[tuple[int, bool], bytes] = {}
    for budget, order in itertools.product((0, 0.6, "least") if emulated else (0, 0.6, 0.3, "least"), (0, 1)):
        least = opened(layers).gpu_bytes_minimum()
        runtime = opened(layers, 0 if budget == 0 else max(least, 0 if budget == "least" else int(budget * experts * layers.geometries[0].row_bytes)))
        heat = np.random.default_rng(order).permutation(experts).astype(np.uint32)
        runtime.preload({0: heat})
        for (tokens, call), scan, _ in itertools.product(calls.items(), (False, True), range(2)):
            found = bits(runtime.forward(0, *call, None, scan))
            assert expected.setdefault((tokens, scan), found) == found, (budget, order, tokens, scan)


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_has_the_same_bits_whatever_its_neighbours(format, opened, emulated):
    layers = one_layer(format)
    runtime = opened(layers)
    x, weights, ids = batch(24, 192, EXPERTS, TOP_K, 1, device_of(emulated))
    other_x, other_weights, other_ids = batch(24, 192, EXPERTS, TOP_K, 2, device_of(emulated))
    whole = runtime.forward(0, x, weights, ids, None, False)
    for tensor, other in ((x, other_x), (weights, other_weights), (ids, other_ids)):
        tensor[1:] = other[1:]
    assert bits(runtime.forward(0, x, weights, ids, None, False)[0]) == bits(whole[0])


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_has_the_same_bits_in_every_batch(format, opened, emulated):
    """In batches of up to COMBINED_TOKENS; in larger ones its experts' kernels depend on whether they have MANY pairs, and on nothing else."""
    runtime = opened(one_layer(format))
    x, weights, ids = batch(60, 192, EXPERTS, TOP_K, 1, device_of(emulated))
    ids[0] = torch.arange(TOP_K)   # of the first token
    few, many = ids.clone(), ids.clone()
    few[1:] = few[1:].clamp(min=TOP_K)
    many[1 : MANY + 1, :TOP_K] = ids[0]

    def first(tokens: int, ids: torch.Tensor, scan: bool) -> bytes:
        return bits(runtime.forward(0, x[:tokens], weights[:tokens], ids[:tokens].contiguous(), None, scan)[0])

    sizes = (1, 2, 3, 7, 8, 9, 23, COMBINED_TOKENS) if emulated else range(1, COMBINED_TOKENS + 1)
    small = {first(tokens, which, scan) for tokens in sizes for which in (ids, many) for scan in (False, True)}
    assert len(small) == 1
    sizes = (COMBINED_TOKENS + 1, 40) if emulated else range(COMBINED_TOKENS + 1, 61)
    assert {first(tokens, few, scan) for tokens in sizes for scan in (False, True)} == small
    large = {first(tokens, many, scan) for tokens in sizes for scan in (False, True)}
    assert len(large) == 1


def test_a_row_of_a_long_scan_has_the_bits_of_a_short_one(opened, emulated):
    """5000 rows, spread and all to one expert: those of 300."""
    if emulated:
        pytest.skip("minutes on the CPU")
    layers = one_layer("tcq2")
    runtime = opened(layers, top_k=2, max_tokens=5000, decode_tokens=16)
    x, weights, ids = batch(5000, 192, EXPERTS, 2, 2, "cuda")
    alone = torch.full_like(ids, -1)
    alone[:, 1] = 7
    for routed in (ids, alone):
        whole = runtime.forward(0, x, weights, routed, None, True)
        check(whole, layers.reference(0, x, weights, routed))
        assert bits(whole[4700:]) == bits(runtime.forward(0, x[4700:], weights[4700:], routed[4700:], None, True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 6, 16])
def test_a_captured_layer_has_the_bits_of_an_eager_one(format, tokens, opened, needs_graphs):
    runtime = opened(one_layer(format))
    x, weights, ids = batch(tokens, 192, EXPERTS, TOP_K, 0, "cuda")
    runtime.forward(0, x, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = runtime.forward(0, x, weights, ids)
    for seed in range(10):
        for tensor, value in zip((x, weights, ids), batch(tokens, 192, EXPERTS, TOP_K, seed, "cuda"), strict=True):
            tensor.copy_(value)
        eager = bits(runtime.forward(0, x, weights, ids))
        for _ in range(3):
            poison_scratch(runtime)
            out.fill_(torch.nan)
            graph.replay()
            assert bits(out) == eager, seed


def test_captured_steps(opened, needs_graphs):
    """A graph replayed with other contents of the same tensors, at batch sizes between captured ones (the rest masked), and cold."""
    geometries = {layer: RowGeometry("tcq2", 192, 96, False) for layer in range(3)}
    layers = Layers(geometries, 24)
    runtime = opened(layers, 20 * geometries[0].row_bytes)
    tokens = 8
    x, weights, ids = batch(tokens, 192, 24, TOP_K, 0, "cuda")
    kv_slots, outs = torch.zeros(tokens, dtype=torch.int64, device="cuda"), []

    def step():
        return [runtime.forward(layer, x, weights, ids, kv_slots, False) for layer in geometries]

    runtime.arm(False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    runtime.arm(True)
    for seed in range(40):
        live = 1 + seed % tokens
        for tensor, value in zip((x, weights, ids), batch(tokens, 192, 24, TOP_K, seed, "cuda"), strict=True):
            tensor.copy_(value)
        kv_slots.fill_(-1)[:live] = torch.arange(live, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        for layer, out in zip(geometries, outs, strict=True):
            check(out, layers.reference(layer, x, weights, ids, masked=range(live, tokens)), (seed, layer))
