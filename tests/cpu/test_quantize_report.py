"""Reports merge, and a biased model is refused."""

import math

import numpy as np
import pytest

from moet.errors import QuantizeError
from moet.layout import RowGeometry
from moet.quantize import BIAS_LIMIT, MatrixReport, RowReport, check_bias, encode_row
from moet.quantize.report import matrix_report
from layout_cases import random_expert


def report_with(bias: float, weights: int = 10**7) -> MatrixReport:
    return matrix_report(weights, 0, 0, 0, (1.0, 0.09, bias * weights, 0.4 * weights))


def test_merging_adds_sums_and_counts():
    geometry = RowGeometry("sym2", 96, 96, False)
    reports = []
    for seed in range(3):
        row = np.empty(geometry.row_bytes, np.uint8)
        reports.append(encode_row(geometry, random_expert(RowGeometry("mxfp4", 96, 96, False), seed), row))
    merged = sum(reports, RowReport())
    assert merged.up.matrices == 3 and merged.total.matrices == 9 and merged.total.weights == 9 * 96 * 96
    assert merged.up.errors == sum(r.up.errors for r in reports)
    assert merged.up.relative_rms == math.sqrt(sum(r.up.errors for r in reports) / sum(r.up.squares for r in reports))
    assert merged.up.mean_absolute_bias == pytest.approx(sum(abs(r.up.bias) for r in reports) / 3)


def test_opposite_biases_do_not_hide_each_other():
    merged = report_with(0.02) + report_with(-0.02)
    assert merged.bias == 0 and merged.mean_absolute_bias == pytest.approx(0.02)
    with pytest.raises(QuantizeError, match="layer 3.*at most 0.00[0-9]+, found 0.02000"):
        check_bias(merged, "layer 3")


def test_the_limit():
    assert report_with(0).mean_chance < 0.04 * BIAS_LIMIT
    check_bias(report_with(BIAS_LIMIT) + report_with(-BIAS_LIMIT))
    with pytest.raises(QuantizeError):
        check_bias(report_with(BIAS_LIMIT * 1.05))


def test_chance_is_what_random_signs_give():
    """Mean |bias| of many matrices with errors of random sign, against the formula."""
    rng = np.random.default_rng(0)
    errors = rng.choice([-1.0, 1.0], (2000, 512)) * rng.random(512)
    reports = [matrix_report(512, 0, 0, 0, (1.0, 1.0, e.sum(), (e**2).sum())) for e in errors]
    merged = sum(reports, MatrixReport())
    assert merged.mean_absolute_bias == pytest.approx(merged.mean_chance, rel=0.05)
    check_bias(merged)


def test_nothing_is_not_an_error():
    assert (MatrixReport().relative_rms, MatrixReport().bias, MatrixReport().mean_absolute_bias) == (0, 0, 0)
    check_bias(MatrixReport())
