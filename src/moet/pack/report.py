"""From the report of every matrix to those in moet.json."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from moet.pack.journal import LayerEntry
from moet.pack.manifest import Layer, LayerReport, ProjectionReport, ProjectionSummary, Report
from moet.quantize import MatrixReport, RowReport, check_bias

PROJECTIONS = ("gate", "up", "down")
DIGITS = 5
FIELDS = fields(MatrixReport)


def merged(reports: Iterable[RowReport]) -> RowReport:
    """Their sum. Floats are summed exactly and rounded once (fsum), so neither the order of the workers, nor an
    interruption, nor the Python version (3.12 changed `sum`) can change a bit of moet.json."""
    rows = list(reports)
    return RowReport(*(_merged([getattr(row, name) for row in rows]) for name in PROJECTIONS))


def _merged(matrices: Sequence[MatrixReport]) -> MatrixReport:
    columns = ([getattr(m, f.name) for m in matrices] for f in FIELDS)
    return MatrixReport(*(sum(c) if all(type(x) is int for x in c) else math.fsum(c) for c in columns))


def layer_report(rows: Sequence[RowReport]) -> LayerReport:
    """`rows` by expert."""
    return LayerReport(*(_projection([getattr(row, name) for row in rows]) for name in PROJECTIONS))


def refuse_bias(entries: Iterable[LayerEntry]) -> None:
    """Raises QuantizeError if the mean |bias| of the matrices so far passes the limit by more than chance."""
    total = merged(entry.sums for entry in entries)
    check_bias(_merged([getattr(total, name) for name in PROJECTIONS]))


def summary(entries: Sequence[LayerEntry], dense_bytes: int) -> Report:
    total = merged(entry.sums for entry in entries)
    weights = sum(getattr(total, name).weights for name in PROJECTIONS)
    base = sum(entry.layer.base.bytes for entry in entries)
    native = sum(entry.layer.native.bytes for entry in entries if entry.layer.native)
    return Report(
        weights,
        round(8 * base / weights, 4),
        round(8 * native / weights, 4),
        base,
        native,
        dense_bytes,
        *(_summary(getattr(total, name)) for name in PROJECTIONS),
    )


def worst(layers: Iterable[Layer]) -> tuple[float, str]:
    """The largest relative error of a matrix, and which one it is."""
    return max(
        (error, f"layer {layer.index}, expert {expert}, {name}")
        for layer in layers
        for name in PROJECTIONS
        for expert, error in enumerate(getattr(layer.report, name).error)
    )


def _projection(matrices: list[MatrixReport]) -> ProjectionReport:
    errors, biases = (tuple(_short(getattr(m, name)) for m in matrices) for name in ("relative_rms", "bias"))
    return ProjectionReport(errors, biases, sum(m.alternated for m in matrices))


def _summary(m: MatrixReport) -> ProjectionSummary:
    return ProjectionSummary(_short(m.relative_rms), _short(m.bias), _short(m.mean_absolute_bias))


def _short(x: float) -> float:
    return float(f"{x:.{DIGITS}g}") + 0.0
