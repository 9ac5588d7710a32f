"""The GEMMs for many tokens an expert, their own source run by the emulator, against the float64 reference: wgmma (arch 90) and mma.sync (80)."""

import numpy as np
import pytest

from moet.layout import FORMATS, RowGeometry
from moet.models import Activation
from tests.cpu.test_expert_mlp_gpu import Bench, routing, to_bf16

ARCHS = [80, 90]


def check(bench: Bench, ids: np.ndarray, seed: int, blocks: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = to_bf16(rng.standard_normal((len(ids), bench.geometry.hidden)))
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    out = bench.run(x, weights, ids, "large", blocks)
    bench.check(x, weights, ids, out)
    return out


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, arch):
    bench = Bench(RowGeometry(format, 192, 96, False), Activation(), 4, 1, arch=arch)
    ids = routing(np.random.default_rng(2), 21, 2, 4)[1]
    ids[4, 1] = -1
    check(bench, ids, 3)
