"""Decoding on a device against the definition, bit for bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moet.checkpoint import Checkpoint, Matrix, dequantize
from moet.forward.decode import decode
from tests import generators as g


def random_matrix(format: str, rows: int, cols: int) -> Matrix:
    random = np.random.default_rng(0)
    if format == "bf16":
        values = random.standard_normal((rows, cols), np.float32)
        return Matrix(
            format,
            rows,
            cols,
            np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8),
        )
    if format in ("mxfp4", "nvfp4"):
        codes = random.integers(0, 256, (rows, cols // 2), np.uint8)
        group, top = (32, 255) if format == "mxfp4" else (16, 127)
        scales = random.integers(0, top, (rows, cols // group), np.uint8)
        return Matrix(format, rows, cols, codes, scales, 0.3 if format == "nvfp4" else 1.0)
    codes = (
        random.integers(0, 127, (rows, cols), np.uint8) | random.integers(0, 2, (rows, cols), np.uint8) << 7
    )
    shape = (rows,) if format == "fp8_row" else (-(-rows // 32), -(-cols // 32))
    return Matrix(format, rows, cols, codes, random.standard_normal(shape, np.float32))


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "nvfp4", "fp8", "fp8_row"])
def test_same_bits(format):
    matrix = random_matrix(format, 72, 96)
    with np.errstate(over="ignore", under="ignore"):
        wanted = dequantize(matrix, np.float32)
    assert np.array_equal(decode(matrix).numpy().view(np.uint32), wanted.view(np.uint32))


def test_a_checkpoints_experts(tmp_path):
    g.write_deepseek_v3(tmp_path, scheme="fp8_block")
    for weights in Checkpoint.open(tmp_path).experts(1):
        for matrix in (weights.gate, weights.up, weights.down):
            assert np.array_equal(decode(matrix).numpy(), dequantize(matrix, np.float32))
