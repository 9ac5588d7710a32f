"""The emulator itself: meetings, scheduling, errors, and numbers that the GPU's instructions define."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.emulator.build import EmulatedModule, EmulatorError

CODE = Path(__file__).parent / "emulator" / "probes.cuh"


class Args(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("c", ctypes.c_void_p), ("n", ctypes.c_int64)]


def launch(kernel, blocks, threads, *arrays, n=0, seed=0, resident=16, limit_s=60.0, shared_bytes=0, defines=None):
    module = EmulatedModule([str(CODE)], defines, seed=seed, resident=resident, limit_s=limit_s)
    pointers = [array.ctypes.data for array in arrays]
    module.launch(kernel, blocks, threads, Args(*pointers, *[None] * (3 - len(arrays)), n), shared_bytes)


@pytest.mark.parametrize("seed", range(6))
def test_block_sum_through_shuffles_and_shared_memory(seed):
    values = np.arange(5 * 256, dtype=np.uint32)
    sums = np.zeros(5, np.uint32)
    launch("probe_sum", 5, 256, values, sums, seed=seed, resident=2)
    assert sums.tolist() == values.reshape(5, 256).sum(1).tolist()


def test_without_a_context_switch_of_our_own():
    """As on machines that are not x86-64."""
    values, sums, chain = np.arange(512, dtype=np.uint32), np.zeros(2, np.uint32), np.zeros(5, np.uint32)
    launch("probe_sum", 2, 256, values, sums, seed=3, defines={"MOET_UCONTEXT": 1})
    launch("probe_chain", 4, 32, chain, seed=3, defines={"MOET_UCONTEXT": 1})
    assert sums.tolist() == values.reshape(2, 256).sum(1).tolist() and chain[4] == 4


@pytest.mark.parametrize("seed", range(6))
def test_dynamic_shared_memory_transposes(seed):
    values = np.arange(32 * 32, dtype=np.uint32)
    out = np.zeros_like(values)
    launch("probe_transpose", 1, 1024, values, out, seed=seed, shared_bytes=4096)
    assert (out.reshape(32, 32) == values.reshape(32, 32).T).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_block_that_waits_lets_the_others_run(seed):
    chain = np.zeros(9, np.uint32)
    launch("probe_chain", 8, 32, chain, seed=seed, resident=8)
    assert chain[8] == 8


def test_a_wait_for_a_block_that_does_not_run_is_an_error():
    chain = np.zeros(9, np.uint32)
    with pytest.raises(EmulatorError, match="longer than its limit"):
        launch("probe_chain", 8, 32, chain, resident=4, limit_s=0.2)


def test_seeds_reach_different_orders():
    orders = set()
    for seed in range(1, 20):
        order, count = np.zeros(4, np.uint32), np.zeros(1, np.uint32)
        launch("probe_order", 4, 32, order, count, seed=seed)
        orders.add(tuple(order))
    assert len(orders) > 4


@pytest.mark.parametrize(
    "kernel, message",
    [
        ("probe_divergent", "different operations"),
        ("probe_early_exit", "has ended|ended while"),
        ("probe_half_warp", "deadlock"),
        ("probe_overflow", "behind the dynamic shared memory"),
    ],
)
def test_broken_kernels_are_refused(kernel, message):
    with pytest.raises(EmulatorError, match=message):
        launch(kernel, 1, 64, np.zeros(64, np.uint32), shared_bytes=64)
    sums = np.zeros(1, np.uint32)  # the emulator goes on
    launch("probe_sum", 1, 64, np.ones(64, np.uint32), sums)
    assert sums[0] == 64


def test_launches_of_half_warps_and_of_too_many_threads_are_refused():
    for threads in (48, 2048, 0):
        with pytest.raises(EmulatorError, match="whole warps"):
            launch("probe_sum", 1, threads, np.zeros(1, np.uint32), np.zeros(1, np.uint32))


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to bf16, to nearest even; float32 in and out."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def words(values: np.ndarray) -> np.ndarray:
    """bf16 values in pairs along the last axis, low half first."""
    half = (values.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(half).view(np.uint32)


@pytest.mark.parametrize("seed", range(3))
def test_mma_is_a_matrix_product(seed):
    rng = np.random.default_rng(seed)
    a, b = bf16(rng.standard_normal((16, 16))), bf16(rng.standard_normal((16, 8)))
    d = rng.standard_normal((16, 8)).astype(np.float32)
    expected = d.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    launch("probe_mma", 1, 32, words(a), words(b.T.copy()), d, seed=seed)
    assert np.abs(d - expected).max() < 1e-5


def test_bf16_products_are_rounded_once():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 1 << 32, (2, 200_000), np.uint64).astype(np.uint32)
    # Small ones too: products below the normal range are where rounding twice shows.
    pairs[:, ::2] = (pairs[:, ::2] & 0x807F807F) | (rng.integers(50, 80, (2, 100_000)) * 0x00800080).astype(
        np.uint32
    )
    out = np.zeros(pairs.shape[1], np.uint32)
    launch("probe_multiply", 1, 32, pairs[0].copy(), pairs[1].copy(), out, n=len(out))
    with np.errstate(invalid="ignore", over="ignore"):
        for shift in (0, 16):
            a, b, got = (
                ((p >> shift & 0xFFFF) << 16).view(np.float32).astype(np.float64) for p in (*pairs, out)
            )
            exact = a * b
            finite = np.isfinite(a) & np.isfinite(b) & (np.abs(exact) < 3.3e38)
            step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 7)
            assert (got[finite] == (np.rint(exact / step) * step)[finite]).all()
            assert finite.sum() > 100_000
            assert np.isnan(got[np.isnan(exact)]).all()


def test_permute_bytes_and_pack():
    out = np.zeros(8, np.uint32)
    launch("probe_bits", 1, 32, out)
    assert [hex(v) for v in out[:5]] == ["0x33221100", "0x77665544", "0x445577", "0xff00ff", "0x40003f80"]
    assert out[5:8].tolist() == [0x7FFF7FFF, 0xFF800000 >> 16 | 0x7F800000, 5]
