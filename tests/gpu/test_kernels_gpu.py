"""DeviceRuntime.forward against the float64 reference for every row format, and against itself, bit for bit, where bits are promised."""

import itertools

import numpy as np
import pytest
import torch
from expert_layers import Layers, batch, check, counters, open_runtime, registration
from layout_cases import sizes_for

from moet.layout import FORMATS, RowGeometry
from moet.models import Activation

EXPERTS, TOP_K = 12, 4
ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation("swiglu", 7.0), "oai": Activation("swiglu_oai", 7.0, 1.702)}
TOKENS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 255, 300)


@pytest.fixture
def opened(emulated):
    """open(layers, gpu_bytes=0, **options) -> an armed runtime; all are closed at the end."""
    held = []

    def open(layers: Layers, gpu_bytes: int = 0, top_k: int = TOP_K, **options):
        poison(emulated)
        store = layers.store(register=registration(emulated))
        runtime = open_runtime(store, layers, top_k, emulated, **options)
        held.extend((runtime, store))
        runtime.allocate(gpu_bytes)
        runtime.arm(True)
        return runtime

    yield open
    for thing in held:
        thing.close()


def poison(emulated: bool, megabytes: int = 256) -> None:
    """Leaves NaNs in the memory that the runtime will get: it must not read what it did not write."""
    if not emulated:
        blocks = [torch.full((megabytes << 17,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        blocks += [torch.full((n,), torch.nan, dtype=torch.bfloat16, device="cuda") for n in (256, 4096, 1 << 18) for _ in range(16)]
        torch.cuda.synchronize()
        del blocks


def device_of(emulated: bool) -> str:
    return "cpu" if emulated else "cuda"


def one_layer(format: str, hidden: int, inter: int, biased: bool = False, activation: str = "swiglu", experts: int = EXPERTS) -> Layers:
    return Layers({0: RowGeometry(format, hidden, inter, biased)}, experts, ACTIVATIONS[activation])


def bits(out: torch.Tensor) -> bytes:
    return out.view(torch.int16).cpu().numpy().tobytes()


@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_size(format, scan, opened, emulated):
    for seed, (hidden, inter) in enumerate((h, f) for h, f in sizes_for(format) if h % 8 == 0):   # activations are read 16 bytes at a time
        layers = one_layer(format, hidden, inter, seed % 2 == 1, list(ACTIVATIONS)[seed % 3])
        runtime = opened(layers)
        x, weights, ids = batch(9, hidden, EXPERTS, TOP_K, seed, device_of(emulated))
        check(runtime.forward(0, x, weights, ids, None, scan), layers.reference(0, x, weights, ids), (format, hidden, inter))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_activation_with_biases_that_saturate_it(format, activation, opened, emulated):
    layers = one_layer(format, 192, 576 if format != "nvfp4" else 96, True, activation)
    runtime = opened(layers)
    x, weights, ids = batch(17, 192, EXPERTS, TOP_K, 3, device_of(emulated))
    for scale in (0.01, 1.0, 30.0):
        scaled = (x.float() * scale).bfloat16()
        check(runtime.forward(0, scaled, weights, ids, None, False), layers.reference(0, scaled, weights, ids), (format, activation, scale))


@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4", "bf16"])
def test_every_number_of_tokens(format, scan, opened, emulated):
    layers = one_layer(format, 192, 96)
    runtime = opened(layers)
    for tokens in TOKENS[:6] if emulated else TOKENS:
        x, weights, ids = batch(tokens, 192, EXPERTS, TOP_K, tokens, device_of(emulated))
        check(runtime.forward(0, x, weights, ids, None, scan), layers.reference(0, x, weights, ids), tokens)


@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
@pytest.mark.parametrize("tokens", [1, 7, 70, 300])
def test_lopsided_routing(tokens, scan, opened, emulated):
    """All tokens to the same experts; all to a few; a token that is routed nowhere; places that route nowhere; nobody routed at all."""
    if emulated and tokens > 70:
        pytest.skip("minutes on the CPU")
    layers = one_layer("tcq2", 192, 96)
    runtime = opened(layers)
    x, weights, ids = batch(tokens, 192, EXPERTS, TOP_K, 11, device_of(emulated))
    same = torch.tensor([3, 0, 11, 7], dtype=torch.int32).expand(tokens, TOP_K).contiguous().to(ids.device)
    single = torch.full_like(ids, -1)
    single[:, 2] = 5
    nowhere, holes = ids.clone(), ids.clone()
    nowhere[tokens // 2] = -1
    holes[:, 1] = -1
    for name, routed in {"same": same, "single": single, "nowhere": nowhere, "holes": holes, "nobody": torch.full_like(ids, -1)}.items():
        check(runtime.forward(0, x, weights, routed, None, scan), layers.reference(0, x, weights, routed), name)


@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
def test_rows_that_are_no_tokens(scan, opened, emulated):
    """A negative KV slot: the row gives zeros, whatever it holds, and the others do not change a bit."""
    layers = one_layer("sym2", 192, 96)
    runtime = opened(layers)
    x, weights, ids = batch(40, 192, EXPERTS, TOP_K, 5, device_of(emulated))
    masked = [0, 7, 8, 20, 39]
    kv_slots = torch.arange(100, 140, device=ids.device)
    whole = runtime.forward(0, x, weights, ids, kv_slots, scan)
    kv_slots[masked] = -1
    x[masked], weights[masked] = torch.nan, torch.nan
    ids[masked[0]] = 1 << 30   # what a padded row may hold
    found = runtime.forward(0, x, weights, ids, kv_slots, scan)
    live = [t for t in range(40) if t not in masked]
    assert not found[masked].any() and bits(found[live]) == bits(whole[live])


def test_unarmed_rows_route_nowhere(opened, emulated):
    layers = one_layer("sym2", 192, 96)
    runtime = opened(layers, gpu_bytes=0)
    runtime.arm(False)
    before = counters(runtime)
    x, weights, ids = batch(4, 192, EXPERTS, TOP_K, 5, device_of(emulated))
    for scan in (False, True):
        assert not runtime.forward(0, x, weights, ids, None, scan).any()
    after = counters(runtime)
    assert (after.hits, after.misses, after.fetched_rows) == (before.hits, before.misses, before.fetched_rows)
    runtime.arm(True)
    check(runtime.forward(0, x, weights, ids, None, False), layers.reference(0, x, weights, ids))


@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4", "nvfp4", "fp8", "bf16"])
def test_same_bits_every_run_whatever_scratch_held(format, scan, opened, emulated):
    """Between two equal calls, calls of other tokens and sizes leave other bytes in the scratch."""
    layers = one_layer(format, 192, 96)
    runtime = opened(layers)
    calls = {tokens: batch(tokens, 192, EXPERTS, TOP_K, tokens, device_of(emulated)) for tokens in (1, 6, 33, 90)[: 3 if emulated else 4]}
    first = {tokens: bits(runtime.forward(0, *call, None, scan)) for tokens, call in calls.items()}
    for _ in range(2 if emulated else 20):
        for tokens, call in calls.items():
            runtime.forward(0, (torch.randn_like(call[0].float()) * 1e4).bfloat16(), call[1], call[2], None, not scan)
            assert bits(runtime.forward(0, *call, None, scan)) == first[tokens], tokens


@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4"])
def test_same_bits_at_every_coverage_and_in_every_slot(format, opened, emulated):
    """Slots, misses and waves change nothing: decode and scan each have one result."""
    layers = one_layer(format, 192, 96, experts=40)
    calls = {tokens: batch(tokens, 192, 40, TOP_K, tokens, device_of(emulated)) for tokens in (1, 5, 16, 60)[: 3 if emulated else 4]}
    expected: dict[tuple[int, bool], bytes] = {}
    for budget, order in itertools.product((0, 0.6, 0.3, "least"), (0, 1)):
        least = opened(layers).gpu_bytes_minimum()
        runtime = opened(layers, 0 if budget == 0 else max(least, 0 if budget == "least" else int(budget * 40 * layers.geometries[0].row_bytes)))
        heat = np.random.default_rng(order).permutation(40).astype(np.uint32)
        runtime.preload({0: heat})
        for (tokens, call), scan, _ in itertools.product(calls.items(), (False, True), range(2)):
            found = bits(runtime.forward(0, *call, None, scan))
            assert expected.setdefault((tokens, scan), found) == found, (budget, order, tokens, scan)


def test_a_token_has_the_same_bits_in_a_batch_of_the_same_size_whatever_its_neighbours(opened, emulated):
    layers = one_layer("tcq2", 192, 96)
    runtime = opened(layers)
    x, weights, ids = batch(24, 192, EXPERTS, TOP_K, 1, device_of(emulated))
    other_x, other_weights, other_ids = batch(24, 192, EXPERTS, TOP_K, 2, device_of(emulated))
    whole = runtime.forward(0, x, weights, ids, None, False)
    for tensor, other in ((x, other_x), (weights, other_weights), (ids, other_ids)):
        tensor[1:] = other[1:]
    assert bits(runtime.forward(0, x, weights, ids, None, False)[0]) == bits(whole[0])


@pytest.mark.parametrize("format", ["sym2", "tcq2", "bf16"])
def test_ranks_add_up(format, emulated):
    layers = one_layer(format, 192, 160, True, "oai")
    x, weights, ids = batch(9, 192, EXPERTS, TOP_K, 4, device_of(emulated))
    expected, parts = layers.reference(0, x, weights, ids), []
    for rank in range(3):
        with_rank = layers.store(register=registration(emulated), rank=rank, world=3)
        runtime = open_runtime(with_rank, layers, TOP_K, emulated)
        runtime.allocate(0)
        runtime.arm(True)
        parts.append(runtime.forward(0, x, weights, ids, None, False).double())
        runtime.close()
        with_rank.close()
    # Each part is rounded by itself, and parts may cancel: relative to their sizes, not to the sum's.
    size = torch.sqrt(sum(p.square().sum(-1) for p in parts)).cpu().numpy()
    check(sum(parts), (expected[0], np.maximum(expected[1], size), expected[2]))


def test_layers_of_different_formats_share_a_runtime(opened, emulated):
    """Three classes: slots of each size are their own, and a scan in one does not disturb the others."""
    geometries = {2: RowGeometry("tcq2", 192, 96, False), 3: RowGeometry("mxfp4", 192, 96, False), 7: RowGeometry("bf16", 192, 64, False)}
    layers = Layers(geometries, EXPERTS)
    runtime = opened(layers, opened(layers).gpu_bytes_minimum())
    for step in range(6):
        for layer in geometries:
            call = batch(5 + step, 192, EXPERTS, TOP_K, 10 * step + layer, device_of(emulated))
            check(runtime.forward(layer, *call, None, step % 3 == 2), layers.reference(layer, *call), (step, layer))


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
