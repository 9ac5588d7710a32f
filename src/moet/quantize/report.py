"""What encoding did to the weights: error, sign bias, zeros; and the refusal of a model whose bias is too large."""

import math
from dataclasses import dataclass, fields
from typing import Self

from moet.errors import QuantizeError

BIAS_LIMIT = 0.005


@dataclass(frozen=True)
class MatrixReport:
    """Sums over the weights v and their 2-bit values q of one or more matrices; `a + b` merges.

    "In unit space" means divided by the block's own 2**e. A zero's sign counts as the checkpoint stores it.
    """

    matrices: int = 0
    weights: int = 0
    zeros: int = 0
    negative_zeros: int = 0
    alternated: int = 0  # matrices whose zeros got their sign from the column's parity
    squares: float = 0.0  # sum of v**2
    errors: float = 0.0  # sum of (q - v)**2
    unit_bias: float = 0.0  # sum of (q - v), in unit space
    unit_squares: float = 0.0  # sum of (q - v)**2, in unit space
    absolute_bias: float = 0.0  # sum over matrices of |bias of the matrix|
    chance: float = 0.0  # sum over matrices of the |bias| that errors of random sign would give

    def __add__(self, other: Self) -> Self:
        return type(self)(*[getattr(self, f.name) + getattr(other, f.name) for f in fields(self)])

    @property
    def relative_rms(self) -> float:
        """sqrt(sum (q - v)**2 / sum v**2); 0 if all weights are zero."""
        return math.sqrt(self.errors / self.squares) if self.squares else 0.0

    @property
    def bias(self) -> float:
        """Mean of (q - v) in unit space over all weights."""
        return self.unit_bias / self.weights if self.weights else 0.0

    @property
    def mean_absolute_bias(self) -> float:
        """Mean over matrices of |bias|."""
        return self.absolute_bias / self.matrices if self.matrices else 0.0

    @property
    def mean_chance(self) -> float:
        """Mean over matrices of the |bias| to be expected from errors of random sign: 2e-4 at 8 million weights, 0.01 at two thousand."""
        return self.chance / self.matrices if self.matrices else 0.0


def matrix_report(weights: int, zeros: int, negative_zeros: int, alternated: int, sums: tuple[float, float, float, float]) -> MatrixReport:
    """Report of one matrix. sums: squares, errors, unit_bias, unit_squares.

    The mean of n errors of random sign and mean square s2 is normal with deviation sqrt(s2 / n), and its magnitude is sqrt(2 / pi) of that on average.
    """
    chance = math.sqrt(2 / math.pi * sums[3]) / weights
    return MatrixReport(1, weights, zeros, negative_zeros, alternated, *sums, abs(sums[2]) / weights, chance)


@dataclass(frozen=True)
class RowReport:
    """The reports of an expert's matrices, or of many experts'; `a + b` merges."""

    gate: MatrixReport = MatrixReport()
    up: MatrixReport = MatrixReport()
    down: MatrixReport = MatrixReport()

    def __add__(self, other: Self) -> Self:
        return type(self)(self.gate + other.gate, self.up + other.up, self.down + other.down)

    @property
    def total(self) -> MatrixReport:
        return self.gate + self.up + self.down


def check_bias(report: MatrixReport, name: str = "model") -> None:
    """Raises QuantizeError if the mean |bias| over matrices passes BIAS_LIMIT by more than chance explains.

    What chance gives is added to the limit because small matrices reach 0.005 by themselves; at the sizes that are served it is under 4 % of the limit.
    """
    limit = BIAS_LIMIT + report.mean_chance
    if report.mean_absolute_bias > limit:
        raise QuantizeError(
            f"{name}: mean |sign bias| of {report.matrices} matrices at 2 bits: expected at most {limit:.5f}, found {report.mean_absolute_bias:.5f} "
            f"(signed: {report.bias:+.5f}). Errors of one sign add up across experts and layers, and such a model talks in loops; "
            "serve this checkpoint at native precision."
        )
