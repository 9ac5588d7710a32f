"""Paired statistics, and what they could have found: bootstrap intervals, McNemar's exact test, and the power of each at the sample size used.

Units are windows, documents or prompts, never tokens: tokens of one text are not independent, and intervals over them are too narrow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SEED = 0
RESAMPLES = 10_000
CONFIDENCE = 0.95
UNITS = 6
"""Fewest units of an interval: the extremes of six draws hold the median with a probability of 1 - 2 / 2^6 = 97 %, those of five with 94 %."""
POWER = 0.8
"""The usual least power of a test that may be called a gate."""


@dataclass(frozen=True)
class Interval:
    """`value` of the whole sample, its bootstrap interval [low, high] at CONFIDENCE, and its standard error, from `units` independent units."""

    value: float
    low: float
    high: float
    error: float
    units: int


def ratio(over: Sequence[float], under: Sequence[float], *, minus: Sequence[float] | None = None, seed: int = SEED) -> Interval:
    """sum(over) / sum(under), a mean per token or byte; with `minus`, sum(over - minus) / sum(under), the paired difference. All [units].

    The units are drawn with replacement, RESAMPLES times (Efron 1979), numerator and denominator together. The percentiles are Hesterberg's expanded ones (2015, The
    American Statistician 69:4, section 4.3), and the error has the factor sqrt(n / (n - 1)), because plain ones are too narrow for few units. With fewer than UNITS units,
    or an infinite one, the interval is (-inf, inf): nothing is known about it. Raises ValueError if the lengths differ or `under` adds up to 0.
    """
    a, b = np.asarray(over, float), np.asarray(under, float)
    if minus is not None:
        a = a - np.asarray(minus, float)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"ratio: expected one number a unit, twice as many alike, found {a.shape} and {b.shape}")
    if not b.sum() > 0:
        raise ValueError("ratio: expected something to divide by, found none")
    value = float(a.sum() / b.sum())
    if len(a) < UNITS or not math.isfinite(value):
        return Interval(value, -math.inf, math.inf, math.inf, len(a))
    means = np.concatenate([drawn @ a / (drawn @ b) for drawn in resamples(len(a), seed)])
    tail = expanded_tail(len(a))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(value, float(low), float(high), float(means.std(ddof=1)) * math.sqrt(len(a) / (len(a) - 1)), len(a))


def expanded_tail(units: int) -> float:
    """Share of the resamples below the interval: the normal tail beyond sqrt(n / (n - 1)) times Student's quantile of n - 1 degrees of freedom."""
    from scipy.stats import norm, t

    return float(norm.sf(math.sqrt(units / (units - 1)) * t.isf((1 - CONFIDENCE) / 2, units - 1)))


def resamples(units: int, seed: int = SEED) -> Iterator[np.ndarray]:
    """How often each unit is in each of RESAMPLES resamples, in blocks of at most 64 MiB: float64 [resamples, units], rows add up to `units`."""
    random, equal = np.random.default_rng(seed), np.full(units, 1 / units)
    step = max(1, (64 << 20) // (8 * units))
    for start in range(0, RESAMPLES, step):
        yield random.multinomial(units, equal, min(step, RESAMPLES - start)).astype(float)


@dataclass(frozen=True)
class McNemar:
    """Paired yes-or-no outcomes. lost: the reference was right and the candidate was not; won: the reverse. p: two-sided. difference: (won - lost) / n."""

    n: int
    both: int
    lost: int
    won: int
    p: float

    @property
    def difference(self) -> float:
        return (self.won - self.lost) / self.n


def mcnemar(reference: Sequence[bool], candidate: Sequence[bool]) -> McNemar:
    """McNemar (1947) in its exact form, the binomial test of `lost` among the discordant pairs, which needs no minimum count. Raises ValueError on unequal lengths or none."""
    from scipy.stats import binomtest

    a, b = np.asarray(reference, bool), np.asarray(candidate, bool)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"mcnemar: expected pairs of outcomes, found {a.shape} and {b.shape}")
    lost, won = int((a & ~b).sum()), int((~a & b).sum())
    p = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    return McNemar(len(a), int((a & b).sum()), lost, won, p)


def mcnemar_power(n: int, discordant: float, loss: float, alpha: float = 1 - CONFIDENCE) -> float:
    """Probability that the exact two-sided test over n pairs finds a true loss, in the right direction.

    discordant: share of pairs whose outcomes differ; at least `loss`. loss: (lost - won) / n, above 0. Exact: the sum over both binomials, not the normal approximation.
    """
    from scipy.stats import binom

    discordant = min(1.0, max(discordant, loss))
    towards = (1 + loss / discordant) / 2  # share of discordant pairs that are losses
    m = np.arange(n + 1)
    needed = _needed(n, alpha)
    return float(binom.pmf(m, n, discordant) @ binom.sf(needed - 1, m, towards))


def _needed(n: int, alpha: float) -> np.ndarray:
    """Least number of losses among m discordant pairs that is significant, int [n + 1]; m + 1 where none is."""
    from scipy.stats import binom

    m = np.arange(n + 1)
    # With p = 1/2 the two-sided p-value is twice the tail: significant iff P(X >= k) <= alpha / 2.
    k = binom.isf(alpha / 2, m, 0.5).astype(int) + 1
    return np.minimum(k, m + 1)


def mean_power(error: float, loss: float, units: int, alpha: float = 1 - CONFIDENCE) -> float:
    """Probability that a two-sided t-test of a mean over `units` with standard error `error` finds a true loss, in the right direction: noncentral t."""
    from scipy.stats import nct, t

    if units < 2 or not math.isfinite(error):
        return 0.0
    if error == 0:
        return 1.0
    found = float(nct.sf(t.isf(alpha / 2, units - 1), units - 1, loss / error))
    return found if math.isfinite(found) else 1.0  # scipy gives NaN far out in the tail, where the loss is 40 standard errors


@dataclass(frozen=True)
class Power:
    """Whether a gate could have caught a loss. loss: in the measured unit; power: probability of finding it; detectable: least loss that is found with POWER."""

    what: str
    loss: float
    power: float
    detectable: float

    @property
    def adequate(self) -> bool:
        return self.power >= POWER

    @property
    def words(self) -> str:
        """One sentence for people."""
        least = f"the least loss that it finds with a power of {POWER:.0%} is {_points(self.detectable)}" if self.detectable <= 1 else f"no loss is found with a power of {POWER:.0%}"
        if self.adequate:
            return f"{self.what}: a loss of {_points(self.loss)} would have been caught with probability {self.power:.2f}; {least}."
        return f"{self.what}: COULD NOT HAVE CAUGHT a loss of {_points(self.loss)} (probability {self.power:.2f}); {least}."


def _points(share: float) -> str:
    return f"{100 * share:.3g} points"


def power_of_pairs(what: str, test: McNemar, loss: float = 0.02) -> Power:
    """Of McNemar's test at this n and its share of discordant pairs, which is taken as at least one pair: none seen is not none there."""
    return power_of_share(what, test.n, max(test.lost + test.won, 1) / test.n, loss)


def power_of_share(what: str, n: int, discordant: float, loss: float = 0.02) -> Power:
    """Of McNemar's test over n pairs of which a share `discordant` differs."""
    return Power(what, loss, mcnemar_power(n, discordant, loss), _least(lambda x: mcnemar_power(n, discordant, x)))


def power_of_interval(what: str, interval: Interval, loss: float = 0.02, *, least_error: float = 0.0) -> Power:
    """Of a test of a mean difference with the interval's standard error. least_error: what one event in the sample would have made it; none seen is not none there."""
    error = max(interval.error, least_error)
    return Power(what, loss, mean_power(error, loss, interval.units), _least(lambda x: mean_power(error, x, interval.units)))


def _least(power: Callable[[float], float]) -> float:
    """Least loss in (0, 1] with POWER, to 1e-4; inf if there is none."""
    low, high = 0.0, 1.0
    if power(high) < POWER:
        return math.inf
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test (1945), exact where scipy can; 1 where no pair differs."""
    from scipy.stats import wilcoxon

    d = np.asarray(differences, float)
    return float(wilcoxon(d).pvalue) if d.any() else 1.0
