"""The GEMMs for many tokens an expert, their own source run by the emulator, against the float64 reference: wgmma (arch 90) and mma.sync (80)."""

import numpy as np
import pytest

from moet.kernels.expert_mlp.launches import MANY
from moet.layout import FORMATS, RowGeometry
from moet.models import Activation
from tests.cpu.test_expert_mlp_gpu import Bench, routing, to_bf16

ARCHS = [80, 90]


def inputs(bench: Bench, ids: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return to_bf16(rng.standard_normal((len(ids), bench.geometry.hidden))), rng.uniform(0.1, 1, ids.shape).astype(np.float32), ids


def check(bench: Bench, ids: np.ndarray, seed: int, blocks: int = 6) -> np.ndarray:
    x, weights, ids = inputs(bench, ids, seed)
    out = bench.run(x, weights, ids, "large", blocks)
    bench.check(x, weights, ids, out, "large")
    return out


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, arch):
    bench = Bench(RowGeometry(format, 192, 96, False), Activation(), 4, 1, arch=arch)
    ids = routing(np.random.default_rng(2), 21, 2, 4)[1]
    ids[4, 1] = -1
    check(bench, ids, 3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("activation", [Activation(limit=1.5), Activation("swiglu_oai", 7.0)])
@pytest.mark.parametrize(("format", "hidden", "inter"), [("mxfp4", 96, 160), ("tcq2", 72, 40), ("fp8_row", 96, 40)])
def test_activations_biases_and_odd_sizes(format, hidden, inter, activation, arch):
    """hidden is no multiple of 64, inter none of 64 or of 32; an odd number of chunks, and of tiles."""
    bench = Bench(RowGeometry(format, hidden, inter, True), activation, 3, 4, arch=arch)
    check(bench, routing(np.random.default_rng(5), 19, 2, 3)[1], 6)


@pytest.mark.parametrize("arch", ARCHS)
def test_slices_of_ranks(arch):
    """Five tiles for two ranks: 2 and 3, of which the second does not begin at a chunk of the whole."""
    ids = routing(np.random.default_rng(7), 20, 2, 3)[1]
    for rank in range(2):
        check(Bench(RowGeometry("sym2", 64, 160, True), Activation(), 3, 8, rank, 2, arch=arch), ids, 9)


@pytest.mark.parametrize("format", ["tcq2", "fp8"])
@pytest.mark.parametrize("arch", ARCHS)
def test_uneven_routing(format, arch):
    """From one pair of an expert to more than two tiles of another, and experts without any."""
    counts = {0: 1, 2: 300, 3: 17, 5: 33, 6: 129}
    ids = np.concatenate([np.full(n, e) for e, n in counts.items()]).astype(np.int32)[:, None]
    np.random.default_rng(10).shuffle(ids)
    check(Bench(RowGeometry(format, 64, 64, False), Activation(), 7, 11, arch=arch), ids, 12, blocks=9)


@pytest.mark.parametrize("arch", ARCHS)
def test_experts_with_few_pairs_beside_others(arch):
    """What is between the GEMMs shares memory: tiles of pairs of the large kernels', planes of the small ones'. Neither writes where the other one does."""
    counts = {0: 1, 1: MANY - 1, 2: 150, 3: 17, 5: MANY, 6: 4}
    ids = np.concatenate([np.full(n, e) for e, n in counts.items()]).astype(np.int32)[:, None]
    np.random.default_rng(26).shuffle(ids)
    bench = Bench(RowGeometry("tcq2", 128, 96, False), Activation(), 7, 27, arch=arch)
    x, weights, ids = inputs(bench, ids, 28)
    out, many = bench.run(x, weights, ids, "mixed", 9), np.isin(ids[:, 0], [e for e, n in counts.items() if n >= MANY])
    bench.check(x, weights, ids, out, "mixed")
    assert (out[many] == bench.run(x, weights, ids, "large", 5)[many]).all()
    assert (out[~many] == bench.run(x, weights, ids, "small", 5)[~many]).all()


@pytest.mark.parametrize("format", ["tcq2", "fp8"])
@pytest.mark.parametrize("arch", ARCHS)
def test_bits_do_not_depend_on_the_batch_the_blocks_or_the_slots(format, arch):
    bench = Bench(RowGeometry(format, 128, 96, False), Activation(), 4, 13, arch=arch)
    ids = routing(np.random.default_rng(14), 60, 2, 4)[1]
    x, weights, ids = inputs(bench, ids, 15)
    together = bench.run(x, weights, ids, "large", 5)
    assert (together == bench.run(x, weights, ids, "large", 11)).all()
    for part in (slice(7, 8), slice(30, 51)):   # other tiles of pairs, and products of other widths
        assert (bench.run(x[part].copy(), weights[part].copy(), ids[part].copy(), "large", 5) == together[part]).all()
    order = np.random.default_rng(16).permutation(4)
    bench.pool, bench.slots = bench.pool[order].copy(), np.argsort(order)[bench.slots]
    bench.cls.pool = bench.pool.ctypes.data
    assert (together == bench.run(x, weights, ids, "large", 5)).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_one_block_and_a_single_chunk_of_each_row(arch):
    """More panels than the copying warp may be ahead, none of them as long as what it has on its way."""
    check(Bench(RowGeometry("tcq2", 64, 32, False), Activation(), 12, 23, arch=arch), routing(np.random.default_rng(24), 20, 2, 12)[1], 25, blocks=1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_interleaving_of_the_copying_warp_and_the_others(seed):
    bench = Bench(RowGeometry("sym2", 320, 96, False), Activation(), 5, 17)
    bench.module.seed = seed
    ids = routing(np.random.default_rng(18), 30, 3, 5)[1]
    assert (check(bench, ids, 19) == Bench(RowGeometry("sym2", 320, 96, False), Activation(), 5, 17).run(*inputs(bench, ids, 19), "large")).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_lost_row_counts_nothing(arch):
    """Its pairs' answers are zeros, the others' are what they were."""
    bench = Bench(RowGeometry("sym2", 256, 64, False), Activation(), 4, 20, arch=arch)
    x, weights, ids = inputs(bench, routing(np.random.default_rng(21), 25, 2, 4)[1], 22)
    plan_of = bench.plan

    def plan_without_the_first(ids):
        plan = plan_of(ids)
        plan.ready[0] = 0x80000000
        return plan

    bench.plan = plan_without_the_first
    out = bench.run(x, weights, ids, "large", 6)
    bench.check(x, np.where(ids == 0, 0, weights).astype(np.float32), ids, out, "large")
