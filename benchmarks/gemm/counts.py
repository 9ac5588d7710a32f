"""Bytes of a row and of a weight, and the weights a clock and multiprocessor that keep up with each GPU's memory. What its pipes let through: docs/kernel-counts.md."""

from typing import Any

from counts.throughput import GPUS

from moet.layout import RowGeometry

FORMATS = ("tcq2", "sym2", "mxfp4", "nvfp4", "fp8", "bf16")


def bytes_of_weight(geometry: RowGeometry) -> float:
    """Scales included, checksums and padding not."""
    return geometry.extras_offset / (3 * geometry.hidden * geometry.inter)


def table(hidden: int = 4096, inter: int = 2048) -> dict[str, dict[str, Any]]:
    """By format. Sizes: of V4-Flash's experts."""
    out = {}
    for name in FORMATS:
        g = RowGeometry(name, hidden, inter, False)
        weight = bytes_of_weight(g)
        out[name] = {"row_bytes": g.row_bytes, "weight_bytes": round(weight, 5), "weights_asked_per_clock_and_sm": {gpu.name: round(gpu.ask(weight), 1) for gpu in GPUS}}
    return out
