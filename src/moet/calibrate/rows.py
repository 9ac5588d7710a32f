"""Codes on a device to base rows and their reports."""

from collections.abc import Callable

import numpy as np
import torch

from moet.calibrate.codebooks import unit_of
from moet.calibrate.encode import Codes
from moet.calibrate.layer import Solved
from moet.checkpoint import ExpertWeights
from moet.layout import RowGeometry, pack_row
from moet.layout.planes import make_matrix
from moet.models import MoeLayer
from moet.quantize import MatrixReport, RowReport
from moet.quantize.report import matrix_report


def row_writer(
    row_format: str, layer: MoeLayer, solved: Solved
) -> Callable[[ExpertWeights, np.ndarray], RowReport]:
    """What writes the base rows of a group's experts: (expert, uint8 [row_bytes]) -> its report."""
    inter = layer.inter
    first, second = (_Arrays(codes) for codes in (solved.first, solved.second))
    units = [unit_of(row_format, codes) for codes in (solved.first, solved.second)]
    halves = {"gate": slice(0, inter), "up": slice(inter, None)}
    reports = {
        name: _reports(solved.native.first[:, half], solved.first.values[:, half], units[0][:, half])
        for name, half in halves.items()
    }
    reports["down"] = _reports(solved.native.second, solved.second.values, units[1])

    def write(weights: ExpertWeights, out: np.ndarray) -> RowReport:
        g = weights.expert - solved.experts.start
        geometry = RowGeometry(row_format, weights.gate.cols, inter, weights.gate.bias is not None)
        biases = {name: getattr(weights, name).bias for name in reports}
        matrices = [
            make_matrix(geometry, name, *first.of(g, half), biases[name]) for name, half in halves.items()
        ]
        matrices.append(make_matrix(geometry, "down", *second.of(g, slice(None)), biases["down"]))
        pack_row(geometry, *matrices, out)
        return RowReport(*(reports[name][g] for name in ("gate", "up", "down")))

    return write


class _Arrays:
    """A group's codes on the CPU, four to a byte, with scales and multipliers."""

    def __init__(self, codes: Codes) -> None:
        c = codes.codes
        c = torch.nn.functional.pad(c, (0, -c.shape[2] % 4)).reshape(*c.shape[:2], -1, 4).int()
        packed = c[..., 0] | c[..., 1] << 2 | c[..., 2] << 4 | c[..., 3] << 6
        self.codes = packed.to(torch.uint8).cpu().numpy()
        self.scales = codes.scales.cpu().numpy()
        self.multipliers = codes.multiplier.tolist()

    def of(self, g: int, rows: slice) -> tuple[np.ndarray, np.ndarray, float]:
        return self.codes[g, rows], self.scales[g, rows], self.multipliers[g]


def _reports(native: torch.Tensor, values: torch.Tensor, units: torch.Tensor) -> list[MatrixReport]:
    """By expert, as `moet.quantize` counts for its own rows; sums in float64."""
    found = []
    for v, q, u in zip(native, values, units, strict=True):
        error = (q - v).double()
        inner = error / u.repeat_interleave(32, dim=1)[:, : v.shape[1]]
        zeros = v == 0
        sums = (v.double().square().sum(), error.square().sum(), inner.sum(), inner.square().sum())
        counts = (v.numel(), int(zeros.sum()), int((zeros & torch.signbit(v)).sum()))
        found.append(matrix_report(*counts, 0, tuple(float(x) for x in sums)))
    return found
