"""What sm_90a adds, in the emulator: products of a warpgroup against numpy, barriers, and errors that only show on one side of "asynchronous"."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.cpu.emulator.build import EmulatedModule, EmulatorError
from tests.cpu.test_emulator import bf16

CODE = Path(__file__).parent / "emulator" / "probes_hopper.cuh"


class Probe(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("d", ctypes.c_void_p), ("units", ctypes.c_int32), ("broken", ctypes.c_int32)]


def halves(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def products(units: int, broken: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Found by a block that computes products when they are waited for, and by one that does so at once; expected."""
    rng = np.random.default_rng(units)
    a, b = bf16(rng.standard_normal((64, 64))), bf16(rng.standard_normal((16 * units, 64)))
    found, module = [], EmulatedModule([str(CODE)])
    a_halves, b_halves = halves(a), halves(b)
    for _ in range(2):   # blocks take turns
        d = np.full((64, 16 * units), np.nan, np.float32)
        module.launch("probe_products", 1, 128, Probe(a_halves.ctypes.data, b_halves.ctypes.data, d.ctypes.data, units, broken), shared_bytes=20 << 10)
        found.append(d)
    return found[0], found[1], (a.astype(np.float64) + a[::-1].astype(np.float64)) @ b.T.astype(np.float64)


@pytest.mark.parametrize("units", [1, 2, 3, 5, 8])
def test_products_of_a_warpgroup(units):
    first, second, expected = products(units)
    assert np.abs(first - expected).max() < 1e-4
    assert (first == second).all()


@pytest.mark.parametrize("broken", [1, 2])
def test_registers_that_are_touched_too_early_change_a_result(broken):
    first, second, expected = products(2, broken)
    assert max(np.abs(first - expected).max(), np.abs(second - expected).max()) > 0.1


def test_more_columns_than_sums_are_refused():
    with pytest.raises(EmulatorError, match="as many as there are sums"):
        products(9)


def test_a_barrier_waits_for_arrivals_and_bytes():
    a, d = halves(bf16(np.arange(32, dtype=np.float32))), np.zeros(32, np.float32)
    module = EmulatedModule([str(CODE)], seed=1)
    for _ in range(4):
        module.launch("probe_barrier", 1, 64, Probe(a.ctypes.data, 0, d.ctypes.data, 0, 0))
        assert d.tolist() == list(range(32))
    module.configure(16, 0.2)
    with pytest.raises(EmulatorError, match="longer than its limit"):   # an arrival is missing
        module.launch("probe_barrier", 1, 64, Probe(a.ctypes.data, 0, d.ctypes.data, 0, 1))


def test_two_words_come_from_an_address_that_eight_divides():
    d, module = np.zeros(3, np.uint32), EmulatedModule([str(CODE)])
    module.launch("probe_two_words", 1, 32, Probe(0, 0, d.ctypes.data, 0, 0))
    assert d.tolist() == [13, 12, 0]
    with pytest.raises(EmulatorError, match="8 divides"):
        module.launch("probe_two_words", 1, 32, Probe(0, 0, d.ctypes.data, 0, 1))
