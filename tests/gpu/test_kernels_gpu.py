"""DeviceRuntime.forward against float64 for every row format, number of tokens and routing; bits are compared in test_kernels_bits.py."""

import dataclasses

import pytest
import torch
from dequantized import check, rounded
from expert_layers import Layers, batch, bits, counters, device_of
from layout_cases import sizes_for

from moet.kernels.expert_mlp.launches import COMBINED_TOKENS
from moet.layout import FORMATS, RowGeometry
from moet.models import Activation

EXPERTS, TOP_K = 12, 4
ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation("swiglu", 7.0), "oai": Activation("swiglu_oai", 7.0, 1.702)}
TOKENS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 255, 300)


def one_layer(format: str, hidden: int, inter: int, biased: bool = False, activation: str = "swiglu", experts: int = EXPERTS) -> Layers:
    return Layers({0: RowGeometry(format, hidden, inter, biased)}, experts, ACTIVATIONS[activation])


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
    """A negative KV slot: the row gives zeros, whatever it holds, and the others do not change a bit. (In larger batches an expert's kernels go by its pairs.)"""
    layers = one_layer("sym2", 192, 96)
    runtime = opened(layers)
    x, weights, ids = batch(COMBINED_TOKENS, 192, EXPERTS, TOP_K, 5, device_of(emulated))
    masked = [0, 7, 8, 20, COMBINED_TOKENS - 1]
    kv_slots = torch.arange(100, 100 + COMBINED_TOKENS, device=ids.device)
    whole = runtime.forward(0, x, weights, ids, kv_slots, scan)
    kv_slots[masked] = -1
    x[masked], weights[masked] = torch.nan, torch.nan
    ids[masked[0]] = 1 << 30   # what a padded row may hold
    found = runtime.forward(0, x, weights, ids, kv_slots, scan)
    live = [t for t in range(COMBINED_TOKENS) if t not in masked]
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


@pytest.mark.parametrize("format", ["sym2", "tcq2", "bf16"])
def test_ranks_add_up(format, opened, emulated):
    layers = one_layer(format, 192, 160, True, "oai")
    x, weights, ids = batch(9, 192, EXPERTS, TOP_K, 4, device_of(emulated))
    parts = [opened(layers, rank=rank, world=3).forward(0, x, weights, ids, None, False).double() for rank in range(3)]
    whole = layers.reference(0, x, weights, ids)
    # Each part is rounded by itself, and parts may cancel: their roundings count, not the sum's.
    apart = [rounded(p, False) for p in parts]
    slack = dataclasses.replace(whole, worst=whole.worst + sum(apart), spread=(whole.spread.square() + sum(a.square() for a in apart)).sqrt())
    check(sum(parts), slack)


def test_layers_of_different_formats_share_a_runtime(opened, emulated):
    """Three classes: slots of each size are their own, and a scan in one does not disturb the others."""
    geometries = {2: RowGeometry("tcq2", 192, 96, False), 3: RowGeometry("mxfp4", 192, 96, False), 7: RowGeometry("bf16", 192, 64, False)}
    layers = Layers(geometries, EXPERTS)
    runtime = opened(layers, opened(layers).gpu_bytes_minimum())
    for step in range(6):
        for layer in geometries:
            call = batch(5 + step, 192, EXPERTS, TOP_K, 10 * step + layer, device_of(emulated))
            check(runtime.forward(layer, *call, None, step % 3 == 2), layers.reference(layer, *call), (step, layer))
