"""Counts instead of clocks: weights that a multiprocessor has to deliver a clock to keep up with memory, and the share of the bandwidth that its pipes leave.

    asked    = bandwidth / bytes of a weight / multiprocessors / clock                     weights a clock and multiprocessor at full bandwidth
    allowed  = min over pipes of lanes of the pipe a clock / lane instructions a weight    from the machine code (benchmarks/kernel_resources.py)
    fraction = min(1, allowed / asked)
"""

from typing import Any

from counts.pipes import GPUS, Gpu

from moet.layout import RowGeometry

FORMATS = ("tcq2", "sym2", "mxfp4", "nvfp4", "fp8", "bf16")


def bytes_of_weight(geometry: RowGeometry) -> float:
    """Scales included, checksums and padding not."""
    return geometry.extras_offset / (3 * geometry.hidden * geometry.inter)


def fraction(gpu: Gpu, weight_bytes: float, allowed: float) -> float:
    """Of the bandwidth. allowed: weights a clock and multiprocessor that the busiest pipe lets through."""
    return min(1.0, allowed / gpu.ask(weight_bytes))


def table(hidden: int = 4096, inter: int = 2048) -> dict[str, dict[str, Any]]:
    """Format -> bytes of a row and of a weight, weights a clock and multiprocessor that each GPU asks for. Sizes: of V4-Flash's experts."""
    out = {}
    for name in FORMATS:
        g = RowGeometry(name, hidden, inter, False)
        weight = bytes_of_weight(g)
        out[name] = {"row_bytes": g.row_bytes, "weight_bytes": round(weight, 5), "weights_asked_per_clock_and_sm": {gpu.name: round(gpu.ask(weight), 1) for gpu in GPUS}}
    return out
