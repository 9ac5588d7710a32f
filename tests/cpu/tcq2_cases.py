"""Packs whose base rows are tcq2, from the numpy encoder alone: each group of 32 by itself, its scale a seventh of its RMS."""

from dataclasses import dataclass

import numpy as np

from moet.layout import RowGeometry, pack_row
from moet.layout.planes import Tcq2Matrix
from moet.numerics import UE5M3, decode_tcq2
from moet.pack.encoder import Batch, Rounding
from moet.quantize import RowReport
from moet.quantize.reference import exact_values
from moet.quantize.reference_tcq2 import encode_codes, pack_codes
from moet.quantize.report import matrix_report

@dataclass
class Tcq2Rounding(Rounding):
    """`moet.pack.encoder.Encoder`."""

    scheme: str = "tcq2-rtn"
    row_format: str = "tcq2"

    def batches(self, layer):
        yield Batch(range(layer.experts), encode_expert)


def encode_expert(weights, out) -> RowReport:
    hidden, inter, biased = weights.gate.cols, weights.gate.rows, weights.gate.bias is not None
    found = [encode(m) for m in (weights.gate, weights.up, weights.down)]
    pack_row(RowGeometry("tcq2", hidden, inter, biased), *(matrix for matrix, _ in found), out)
    return RowReport(*(report for _, report in found))


def encode(matrix) -> tuple[Tcq2Matrix, object]:
    values = exact_values(matrix)
    rows, cols = values.shape
    groups = -(-cols // 32)
    padded = np.pad(values, ((0, 0), (0, 32 * groups - cols))).reshape(rows, groups, 32)
    rms = np.sqrt((padded**2).mean(axis=2)) + 1e-30
    multiplier = 2.0 ** np.floor(np.log2(rms.mean() / 7))
    scales = np.abs(UE5M3 - (rms / 7 / multiplier)[..., None]).argmin(axis=2).astype(np.uint8)
    codes = pack_codes(encode_codes(values, UE5M3[scales] * multiplier))
    units = np.repeat(UE5M3[scales] * multiplier, 32, axis=1)[:, :cols]
    error = decode_tcq2(codes, cols) * units - values
    sums = (values**2).sum(), (error**2).sum(), (error / units).sum(), ((error / units) ** 2).sum()
    zero = values == 0
    counts = values.size, int(zero.sum()), int((zero & np.signbit(values)).sum()), 0
    return Tcq2Matrix(rows, cols, codes, scales, float(multiplier), matrix.bias), matrix_report(*counts, sums)
