"""From the sums of every matrix to the report in moet.json, and the refusal of a model that 2 bits would bend to one side."""

import math
from collections.abc import Iterable, Sequence

from moet.errors import QuantizeError
from moet.pack.journal import LayerEntry, Sums
from moet.pack.manifest import Layer, LayerReport, ProjectionReport, ProjectionSummary, Report
from moet.quantize import MatrixReport, RowReport

PROJECTIONS = ("gate", "up", "down")
BIAS_LIMIT = 0.005
DIGITS = 5


def layer_report(rows: Sequence[RowReport]) -> tuple[LayerReport, Sums]:
    """`rows` by expert. Sums are exact (fsum), so neither the order of the workers nor a resumed run changes a bit."""
    columns = [[getattr(row, name) for row in rows] for name in PROJECTIONS]
    return LayerReport(*map(_projection, columns)), Sums(tuple(map(_sums, columns)))


def _projection(matrices: list[MatrixReport]) -> ProjectionReport:
    return ProjectionReport(
        tuple(_short(_ratio(m.sum_error2, m.sum_value2)) for m in matrices),
        tuple(_short(m.sum_bias / m.weights) for m in matrices),
        sum(bool(m.alternated) for m in matrices),
    )


def _sums(matrices: list[MatrixReport]) -> tuple[int, float, float, float, float, int]:
    return (
        sum(m.weights for m in matrices),
        math.fsum(m.sum_value2 for m in matrices),
        math.fsum(m.sum_error2 for m in matrices),
        math.fsum(m.sum_bias for m in matrices),
        math.fsum(abs(m.sum_bias / m.weights) for m in matrices),
        len(matrices),
    )


def refuse_bias(entries: Iterable[LayerEntry]) -> None:
    """Raises QuantizeError if the mean |bias| of the matrices so far passes 0.005 by more than chance.

    A bias is a mean over n weights of errors that are at most about one unit, so chance alone gives up to 1 / sqrt(n): 0.0003 for 8M weights.
    """
    sums = [p for entry in entries for p in entry.sums.projections]
    matrices = sum(p[5] for p in sums)
    if not matrices:
        return
    mean = math.fsum(p[4] for p in sums) / matrices
    chance = 1 / math.sqrt(sum(p[0] for p in sums) / matrices)
    if mean > BIAS_LIMIT + chance:
        raise QuantizeError(
            f"sign bias: expected a mean |bias| of at most {BIAS_LIMIT} (and {chance:.5f} of chance) over {matrices} matrices, found {mean:.5f}. "
            "A 2-bit model with such a bias does not work; the experts' values are not spread around zero as trained weights are"
        )


def summary(entries: Sequence[LayerEntry], dense_bytes: int) -> Report:
    layers = [entry.layer for entry in entries]
    by_projection = [[entry.sums.projections[i] for entry in entries] for i in range(3)]
    weights = sum(p[0] for column in by_projection for p in column)
    base = sum(layer.base.bytes for layer in layers)
    native = sum(layer.native.bytes for layer in layers if layer.native)
    return Report(
        weights, round(8 * base / weights, 4), round(8 * native / weights, 4), base, native, dense_bytes, *map(_summary, by_projection)
    )  # fmt: skip


def _summary(column: list[tuple[int, float, float, float, float, int]]) -> ProjectionSummary:
    total = [math.fsum(values) for values in zip(*column, strict=True)]
    return ProjectionSummary(_short(_ratio(total[2], total[1])), _short(total[3] / total[0]), _short(total[4] / total[5]))


def worst(layers: Iterable[Layer]) -> tuple[float, str]:
    """The largest relative error of a matrix, and which one it is."""
    return max(
        (error, f"layer {layer.index}, expert {expert}, {name}")
        for layer in layers for name in PROJECTIONS
        for expert, error in enumerate(getattr(layer.report, name).error)
    )  # fmt: skip


def _ratio(error2: float, value2: float) -> float:
    return math.sqrt(error2 / value2) if value2 else 0.0


def _short(x: float) -> float:
    return float(f"{x:.{DIGITS}g}") + 0.0
