"""From the report of every matrix to those in moet.json."""

from collections.abc import Iterable, Sequence

from moet.pack.journal import LayerEntry
from moet.pack.manifest import Layer, LayerReport, ProjectionReport, ProjectionSummary, Report
from moet.quantize import MatrixReport, RowReport, check_bias

PROJECTIONS = ("gate", "up", "down")
DIGITS = 5


def merged(reports: Iterable[RowReport]) -> RowReport:
    """Their sum, always taken in the same order, so that neither workers nor an interruption change a bit."""
    total = RowReport()
    for one in reports:
        total = total + one
    return total


def layer_report(rows: Sequence[RowReport]) -> LayerReport:
    """`rows` by expert."""
    return LayerReport(*(_projection([getattr(row, name) for row in rows]) for name in PROJECTIONS))


def refuse_bias(entries: Iterable[LayerEntry]) -> None:
    """Raises QuantizeError if the mean |bias| of the matrices so far passes the limit by more than chance."""
    check_bias(merged(entry.sums for entry in entries).total)


def summary(entries: Sequence[LayerEntry], dense_bytes: int) -> Report:
    total = merged(entry.sums for entry in entries)
    weights = total.total.weights
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
