"""The block-scaled GEMMs on a GPU (kernels/expert_mlp/scaled.cuh). On sm_120a this is the instruction itself; on others, what goes into it: bytes, scales, selectors."""

import functools
from contextlib import closing

import numpy as np
import pytest
import torch
from expert_layers import Layers, open_runtime, registration
from expert_layers import batch as batch_of_layer

from moet.errors import ConfigError
from moet.kernels.expert_mlp import reference
from moet.kernels.expert_mlp.reference_mxfp8 import rounded
from moet.kernels.expert_mlp.scaled import SCALED_CAPABILITY, SCALED_FORMATS
from moet.kernels.gpu.module import CudaModule
from moet.layout import FORMATS, RowGeometry
from moet.models import Activation
from moet.moe import device
from tests.cpu.scaled_probes import SOURCE, check_block_scaled, check_pack_e4m3
from tests.cpu.scaled_rig import Layer, batch, run_probe


@pytest.fixture(autouse=True)
def has_e4m3(emulated):
    if not emulated and torch.cuda.get_device_capability() < SCALED_CAPABILITY:
        pytest.skip(f"needs E4M3, compute capability {SCALED_CAPABILITY[0]}.{SCALED_CAPABILITY[1]}")


@pytest.fixture
def make_module(emulated):
    if emulated:
        from tests.cpu.emulator.build import EmulatedModule

        return EmulatedModule
    torch.zeros(1, device="cuda")   # a context
    return CudaModule


@pytest.fixture
def layer_of(make_module, emulated):
    return functools.partial(Layer, make_module, gpu=not emulated)


@pytest.mark.parametrize("seed", range(4))
def test_the_instruction(seed, make_module, emulated):
    check_block_scaled(run_probe(make_module([SOURCE], {}), gpu=not emulated), seed)


def test_rounding_to_e4m3(make_module, emulated):
    check_pack_e4m3(run_probe(make_module([SOURCE], {}), gpu=not emulated))


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_formats_and_sizes(format, layer_of, emulated):
    sizes = [(64, 32), (96, 96), (192, 576), (576, 192), (320, 64), (1024, 512)]
    for seed, (hidden, inter) in enumerate(sizes[:2] if emulated else sizes):
        layer = layer_of(RowGeometry(format, hidden, inter, seed % 2 == 1), Activation("swiglu_oai", 7.0) if seed % 3 else Activation(), experts=6, seed=seed)
        for tokens in (5,) if emulated else (1, 9, 64, 200):
            x, ids = batch(tokens, tokens, hidden, 3, 6)
            layer.run(x, ids, blocks=3 if emulated else 132).check()


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_routings(format, layer_of, emulated):
    """All to one, uneven, some nowhere, nobody."""
    layer, tokens = layer_of(RowGeometry(format, 128, 96, False), experts=8, seed=1), 70 if emulated else 1000
    x, ids = batch(2, tokens, 128, 2, 8)
    one, uneven = np.full_like(ids, -1), np.minimum(ids, np.random.default_rng(0).integers(0, 8, ids.shape)).astype(np.int32)
    one[:, 0] = 5
    uneven[uneven[:, 0] == uneven[:, 1], 1] = -1
    for routed in (one, uneven, np.full_like(ids, -1)):
        layer.run(x, routed, blocks=5 if emulated else 264).check()


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_bits(format, layer_of, emulated):
    """The same for any number of blocks, in any slots, alone or in company, run after run."""
    layer, tokens = layer_of(RowGeometry(format, 256, 96, False), experts=8, seed=3), 12 if emulated else 400
    x, ids = batch(3, tokens, 256, 2, 8)
    together = layer.run(x, ids, blocks=4)
    for blocks in (1,) if emulated else (1, 7, 132, 264) * 5:
        assert layer.run(x, ids, blocks=blocks).bits() == together.bits()
    for t in (0, tokens - 1):
        assert layer.run(x[t : t + 1].copy(), ids[t : t + 1].copy()).bits() == together.y[2 * t : 2 * t + 2].tobytes()
    layer.fill(np.roll(layer.slots, 3))
    assert layer.run(x, ids).bits() == together.bits()


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_error_against_exact_activations(format, layer_of, emulated):
    layer = layer_of(RowGeometry(format, 512, 256, False) if emulated else RowGeometry(format, 4096, 2048, False), experts=2, seed=4)
    x, ids = batch(4, 6 if emulated else 64, layer.geometry.hidden, 1, 2)
    error = layer.run(x, ids, blocks=4 if emulated else 132).error()
    print(f"{format}: {np.sqrt((error**2).mean()):.4f} of an answer's norm, at most {error.max():.4f}")
    assert 0.02 < np.sqrt((error**2).mean()) < 0.08


EXPERTS, TOP_K = 6, 2


@pytest.fixture
def forwards(emulated):
    """forwards(layers, calls, gpu_bytes, ...): what a runtime makes of each (x, weights, ids, scan)."""

    def run(layers: Layers, calls: list[tuple], gpu_bytes: int | None = 0, **options) -> list[torch.Tensor]:
        with closing(layers.store(register=registration(emulated))) as store, closing(open_runtime(store, layers, TOP_K, emulated, **options)) as runtime:
            runtime.allocate(runtime.gpu_bytes_minimum() if gpu_bytes is None else gpu_bytes)
            runtime.arm(True)
            return [runtime.forward(0, x, weights, ids, None, scan).cpu() for x, weights, ids, scan in calls]

    return run


def layer_of_rows(format: str, biased: bool = False) -> Layers:
    return Layers({0: RowGeometry(format, 192, 96, biased)}, EXPERTS, Activation(limit=5.0))


def expected_of(layers: Layers, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, rounding=None) -> tuple[np.ndarray, np.ndarray]:
    """float64 [tokens, hidden], and [tokens], the root of the summed squares of a token's parts."""
    values, w, chosen = x.double().cpu().numpy(), weights.double().cpu().numpy(), ids.cpu().numpy()
    out, squares = np.zeros(values.shape), np.zeros(len(values))
    for e in range(layers.experts):
        tokens, places = np.nonzero(chosen == e)
        part = reference.expert_mlp(layers.geometries[0], layers.rows[0][e], values[tokens], layers.activation, rounded=rounding) * w[tokens, places, None]
        np.add.at(out, tokens, part)
        np.add.at(squares, tokens, (part**2).sum(-1))
    return out, np.sqrt(squares)


@pytest.mark.parametrize("format", FORMATS)
def test_a_runtime_with_mxfp8_prefills(format, forwards, emulated):
    """Against activations that are rounded the same way, as near as two roundings to bf16 and three float32 sums are; formats that MXFP8 does not suit keep bf16."""
    layers = layer_of_rows(format, biased=True)
    call = batch_of_layer(40 if emulated else 300, 192, EXPERTS, TOP_K, 1, "cpu" if emulated else "cuda")
    found = forwards(layers, [(*call, True)], prefill_activations="mxfp8")[0].double().numpy()
    wanted, size = expected_of(layers, *call, rounded if format in SCALED_FORMATS else None)
    assert np.linalg.norm(found - wanted, axis=1).max() < 2.0**-7 * size.max()
    assert (np.linalg.norm(found - wanted, axis=1) < 2.0**-7 * size).all()


def test_gpus_without_e4m3_are_refused(forwards, monkeypatch):
    monkeypatch.setattr(device, "EMULATED_CAPABILITY", (8, 6))
    monkeypatch.setattr(device, "capability", lambda number: (8, 6))
    with pytest.raises(ConfigError, match=r"expected compute capability 8\.9 or newer for prefill_activations mxfp8, found 8\.6; use bf16"):
        forwards(layer_of_rows("sym2"), [], prefill_activations="mxfp8")


def test_decoding_and_small_scans_keep_bf16(forwards, emulated):
    layers = layer_of_rows("tcq2")
    calls = [(*batch_of_layer(tokens, 192, EXPERTS, TOP_K, tokens, "cpu" if emulated else "cuda"), scan) for tokens, scan in ((1, False), (30, False), (3, True), (40, True))]
    plain, scaled = forwards(layers, calls), forwards(layers, calls, prefill_activations="mxfp8")
    assert [torch.equal(a, b) for a, b in zip(plain, scaled, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize("format", ["sym2", "tcq2"])
def test_a_runtime_gives_the_same_bits_at_every_coverage(format, forwards, emulated):
    """All rows in slots, or most of them passing through the ring."""
    layers = layer_of_rows(format)
    calls = [(*batch_of_layer(40, 192, EXPERTS, TOP_K, seed, "cpu" if emulated else "cuda"), True) for seed in (1, 2, 1)]
    whole, least = forwards(layers, calls, prefill_activations="mxfp8"), forwards(layers, calls, gpu_bytes=None, prefill_activations="mxfp8", ring_rows=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, least, strict=True)) and torch.equal(whole[0], whole[2])
