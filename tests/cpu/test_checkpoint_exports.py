"""Files that modelopt and llmcompressor wrote mean the weights they were made from, up to what their number
format rounds away."""

from pathlib import Path

import numpy as np
import pytest

from moet.checkpoint import Checkpoint, dequantize_expert

EXPORTS = Path(__file__).parent / "golden" / "exports"

# Relative RMS error that round-to-nearest leaves on normal weights: E2M1 with a free scale per 16 about
# 0.095, with a power of two per 32
# about 0.115, E4M3 about 0.026. A wrong nibble order, scale or matrix gives 1 or more.
CASES = {
    "qwen3-modelopt-nvfp4": ("nvfp4", 0.11),
    "qwen3-modelopt-mxfp4": ("mxfp4", 0.13),
    "qwen3-modelopt-fp8": ("fp8", 0.03),
    "qwen3-modelopt-fp8-2d": ("fp8", 0.03),
    "qwen3-llmcompressor-fp8-dynamic": ("fp8_row", 0.03),
    "qwen3-llmcompressor-mxfp4": ("mxfp4", 0.13),
    "qwen3-llmcompressor-nvfp4a16": ("nvfp4", 0.11),
    "gpt-oss-modelopt-nvfp4": ("nvfp4", 0.11),
}


@pytest.mark.parametrize("name", CASES)
def test_export_is_near_its_source(name):
    format, limit = CASES[name]
    export, source = (
        Checkpoint.open(EXPORTS / name),
        Checkpoint.open(EXPORTS / f"{name.split('-mod')[0].split('-llm')[0]}-source"),
    )
    export.check()
    assert export.native_format(0) == format and source.native_format(0) == "bf16"
    for e in range(2):
        one, two = export.expert(0, e), source.expert(0, e)
        for ours, theirs in zip(dequantize_expert(one), dequantize_expert(two), strict=True):
            error = np.sqrt(((ours - theirs) ** 2).sum() / (theirs**2).sum())
            assert 0.01 < error < limit
        for matrix in ("gate", "up", "down"):
            a, b = getattr(one, matrix).bias, getattr(two, matrix).bias
            assert (a is None and b is None) or np.array_equal(a, b)
