"""The block-scaled GEMMs on a GPU (kernels/expert_mlp/scaled.cuh). On sm_120a this is the instruction itself; on others, what goes into it: bytes, scales, selectors."""

import functools

import numpy as np
import pytest
import torch

from moet.kernels.expert_mlp.scaled import SCALED_CAPABILITY, SCALED_FORMATS
from moet.kernels.gpu.module import CudaModule
from moet.layout import RowGeometry
from moet.models import Activation
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
