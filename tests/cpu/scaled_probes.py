"""What the block-scaled primitives must compute, for whichever module runs probes_scaled.cuh: the emulator's or a GPU's."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moet.kernels.expert_mlp.reference import e4m3
from moet.kernels.expert_mlp.reference_mxfp8 import quantize

SOURCE = str(Path(__file__).parent / "emulator" / "probes_scaled.cuh")


class ScaledProbe(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "scale_a", "scale_b", "d")]


class PackProbe(ctypes.Structure):
    _fields_ = [("values", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("pairs", ctypes.c_int64)]


Run = Callable[[str, type, list[np.ndarray], int], list[np.ndarray]]
"""run(kernel, args, arrays, n) launches one block of 32 threads with pointers to the arrays (and n, where args has a number), and gives the arrays as they are after it."""


def check_block_scaled(run: Run, seed: int) -> None:
    """All codes but NaN, every selector, scales of which some are extreme; D is accumulated."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 256, (n, 32), np.uint8) for n in (16, 8))
    for codes in (a, b):
        codes[codes & 0x7F == 0x7F] -= 1
    scale_a, scale_b = (rng.integers(110, 140, (32, 4), np.uint8) for _ in range(2))
    if seed == 1:
        scale_a[:, 2], scale_b[:, 1], scale_a[8, 3] = 3, 250, 255   # far apart, together in reach; a NaN
    before = rng.standard_normal((4, 4, 4, 16, 8)).astype(np.float32)
    found = run("probe_block_scaled", ScaledProbe, [a.view(np.uint32), b.view(np.uint32), scale_a.view(np.uint32), scale_b.view(np.uint32), before.copy()], 0)[4]
    product, size = e4m3(a) @ e4m3(b).T, np.abs(e4m3(a)) @ np.abs(e4m3(b)).T
    for byte_a in range(4):
        rows = np.concatenate([scale_a[4 * np.arange(8) + i, byte_a] for i in range(2)]).astype(np.float64)
        for byte_b in range(4):
            for lane_b in range(4):
                columns = scale_b[4 * np.arange(8) + lane_b, byte_b].astype(np.float64)
                power = np.where(rows[:, None] == 255, np.nan, 2.0 ** (rows[:, None] + columns - 254))
                with np.errstate(over="ignore"):
                    expected = before[byte_a, byte_b, lane_b] + product * power
                bound = 2.0**-20 * (size * power + np.abs(before[byte_a, byte_b, lane_b])) + 1e-38
                here = found[byte_a, byte_b, lane_b]
                large = np.abs(expected) > 3.4e38
                assert (np.isnan(expected) == np.isnan(here)).all()
                with np.errstate(invalid="ignore"):
                    assert ((np.abs(here - expected) <= bound) | np.isnan(expected) | large).all(), (byte_a, byte_b, lane_b)


def check_pack_e4m3(run: Run) -> None:
    """Every code, every tie between two, their neighbours, what saturates, and values that are none: pack_e4m3 with a scale of 1."""
    codes = e4m3(np.arange(127))
    ties = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, ties, np.nextafter(ties.astype(np.float32), 0), np.nextafter(ties.astype(np.float32), 1e9), [449, 463, 464, 465, 1e30, np.inf, 1e-30, 2.0**-130]])
    values = np.concatenate([values, -values, np.random.default_rng(0).standard_normal(1000) * 10, [np.nan, 0.0]]).astype(np.float32)
    values = values[: len(values) // 2 * 2]
    found = run("probe_pack_e4m3", PackProbe, [values, np.zeros(len(values), np.uint8)], len(values) // 2)[1]
    # A block of 32 whose largest value is 448 has the scale 1.
    blocks = np.full((len(values), 32), 448.0)
    blocks[:, 0] = np.clip(np.nan_to_num(values.astype(np.float64)), -448, 448)
    expected, scales = quantize(blocks)
    assert (scales == 127).all()
    expected = np.where(np.isnan(values), 0x7F, expected[:, 0])
    assert (np.where(np.isnan(values), found & 0x7F, found) == expected).all()
