"""The block-scaled GEMMs (kernels/expert_mlp/scaled.cuh), their own source run by the emulator."""

import functools

import numpy as np
import pytest

from moet.kernels.expert_mlp.reference_mxfp8 import quantize, rounded
from moet.kernels.expert_mlp.scaled import SCALED_FORMATS
from moet.layout import RowGeometry
from moet.models import Activation
from moet.numerics import E4M3, narrow_bf16
from tests.cpu.emulator.build import EmulatedModule
from tests.cpu.scaled_probes import SOURCE, check_block_scaled, check_pack_e4m3
from tests.cpu.scaled_rig import Layer, batch, run_probe



def of_arch(arch: int, **options):
    """make_module for Layer: 120 has the instruction, others what stands in for it."""
    return lambda sources, defines: EmulatedModule(sources, defines | {"MOET_ARCH": arch}, **options)


layer_of = functools.partial(Layer, of_arch(120))


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("seed", range(3))
def test_the_instruction_and_what_stands_in_for_it(seed, arch):
    check_block_scaled(run_probe(of_arch(arch)([SOURCE], {}), gpu=False), seed)


def test_rounding_to_e4m3():
    check_pack_e4m3(run_probe(EmulatedModule([SOURCE]), gpu=False))


def test_the_reference_rounds_to_the_nearest_code_at_the_smallest_scale_without_saturation():
    values = np.array([1.0, 1.75, 1.76, 0.0, 448.0, 449.0, 2.0**-140, 1e38, -3.0])
    codes, scales = quantize(values[:, None] * np.eye(1, 32))
    assert scales[:, 0].tolist() == [119, 119, 120, 0, 127, 128, 0, 245, 120]
    assert codes[:, 0].tolist() == [0x78, 0x7E, 0x76, 0, 0x7E, 0x76, 0, 0x79, 0xFC]
    lattice = E4M3[:127]   # of neighbours as near as each other, the one with the even code
    for value in np.random.default_rng(0).integers(0, 449 * 64, 500) / 64:
        distance = np.abs(lattice - value)
        nearest = np.flatnonzero(distance == distance.min())
        block = np.array([[448.0, -value]])
        assert quantize(block)[0][0, 1] & 0x7F == (nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])
        assert rounded(block)[0, 1] == -lattice[quantize(block)[0][0, 1] & 0x7F]
    assert quantize(np.array([[np.inf, 1.0], [np.nan, 1.0]]))[1].tolist() == [[255], [255]]


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_formats(format):
    g = RowGeometry(format, 160, 96, False)
    x, ids = batch(1, 11, 160, 3, 5)
    ids[4, 1] = -1
    runs = [Layer(of_arch(arch), g, experts=5, seed=2).run(x, ids) for arch in (90, 120)]
    for run in runs:
        run.check()
    assert (np.abs(runs[0].y - runs[1].y)[runs[0].routed] <= 2.0**-7 * np.abs(runs[1].y).max(1, keepdims=True)[runs[0].routed]).all()


@pytest.mark.parametrize("activation", [Activation(limit=1.5), Activation("swiglu_oai", 7.0)])
def test_activations_biases_and_odd_sizes(activation):
    for format, hidden, inter, biased in (("mxfp4", 96, 160, True), ("tcq2", 72, 40, False), ("sym2", 136, 200, True), ("fp8_row", 104, 37, True)):
        layer = layer_of(RowGeometry(format, hidden, inter, biased), activation, experts=3, seed=4)
        x, ids = batch(3, 5, hidden, 2, 3)
        layer.run(x, ids).check()


@pytest.mark.parametrize("world", [2, 3])
def test_slices_of_ranks(world):
    """5 tiles: no whole stage of four for any rank; parts of the answer add up to the whole."""
    g = RowGeometry("tcq2", 128, 160, True)
    x, ids = batch(6, 4, 128, 2, 3)
    whole, parts = layer_of(g, experts=3, seed=7).run(x, ids), []
    for rank in range(world):
        run = layer_of(g, experts=3, seed=7, rank=rank, world=world).run(x, ids)
        run.check()
        parts.append(run.y.astype(np.float64))
    # The values between the GEMMs have the same codes in whole and part; each part is rounded to bf16.
    assert (np.abs(sum(parts) - whole.y) <= 2.0**-8 * (sum(np.abs(p) for p in parts) + np.abs(whole.y))).all()


@pytest.mark.parametrize("format", ["sym2", "tcq2"])
def test_tiles_of_pairs_full_and_not(format):
    """150 pairs of one expert: two whole tiles and one with less than half of its pairs; beside it experts with one pair and with 33."""
    layer = layer_of(RowGeometry(format, 64, 64, False), experts=4, seed=9)
    x, _ = batch(8, 184, 64, 1, 4)
    ids = np.repeat(np.array([2, 0, 3], np.int32), [150, 1, 33])[np.random.default_rng(0).permutation(184), None]
    layer.run(x, ids).check()
    layer.run(x[:3].copy(), np.full((3, 1), -1, np.int32)).check()


@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4", "fp8"])
def test_bits_do_not_depend_on_batch_mates_slots_and_blocks(format):
    layer = layer_of(RowGeometry(format, 128, 64, False), experts=4, seed=11)
    x, ids = batch(10, 20, 128, 2, 4)
    together = layer.run(x, ids)
    assert layer.run(x, ids, blocks=7).bits() == together.bits()
    for t in (0, 7, 19):
        assert layer.run(x[t : t + 1].copy(), ids[t : t + 1].copy()).bits() == together.y[2 * t : 2 * t + 2].tobytes()
    others = narrow_bf16(np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) * 1e3)
    others[5] = x[5]
    assert layer.run(others, ids).y[10:12].tobytes() == together.y[10:12].tobytes()
    layer.fill(np.roll(layer.slots, 1))
    assert layer.run(x, ids).bits() == together.bits()


@pytest.mark.parametrize("seed", range(1, 6))
def test_bits_do_not_depend_on_the_order_of_threads(seed):
    g, (x, ids) = RowGeometry("tcq2", 192, 160, False), batch(15, 70, 192, 2, 3)   # more than a stage of columns, a tile of pairs, a block's strips
    whole = layer_of(g, experts=3, seed=15).run(x, ids)
    whole.check()
    assert Layer(of_arch(120, seed=seed), g, experts=3, seed=15).run(x, ids, blocks=4).bits() == whole.bits()


def test_a_row_that_is_lost_gives_zeros_and_the_others_do_not_change():
    layer = layer_of(RowGeometry("sym2", 64, 96, False), experts=4, seed=12)
    x, ids = batch(12, 9, 64, 2, 4)
    whole, found = layer.run(x, ids), layer.run(x, ids, failed=1)
    lost = ids.ravel() == 1
    assert lost.any() and not found.y[lost].any() and (found.y[~lost] == whole.y[~lost]).all()


def test_infinities_and_nans_reach_their_own_token_only():
    layer = layer_of(RowGeometry("sym2", 64, 32, False), experts=2, seed=13)
    x, ids = batch(13, 6, 64, 2, 2)
    clean = layer.run(x, ids)
    x[1, 3], x[4, 40] = 0x7F80, 0x7FC0
    found = layer.run(x, ids)
    broken = np.repeat(np.isin(np.arange(6), (1, 4)), 2)
    assert np.isnan(found.y[broken]).all() and (found.y[~broken] == clean.y[~broken]).all()


@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_error_against_exact_activations(format):
    """What docs state: about 5 % of an answer's norm, on random weights; a rounding alone is 2.6 %."""
    layer = layer_of(RowGeometry(format, 512, 256, False), experts=2, seed=14)
    x, ids = batch(14, 12, 512, 1, 2)
    error = layer.run(x, ids).error()
    assert 0.02 < np.sqrt((error**2).mean()) < 0.08 and error.max() < 0.12
