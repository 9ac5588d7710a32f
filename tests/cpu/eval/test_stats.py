"""`stats` against scipy, simulation and published numbers, and against statsmodels where it is installed."""

import math

import numpy as np
import pytest
import scipy.stats

from moet.eval import stats


def outcomes(both: int, lost: int, won: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    a = np.repeat([True, True, False, False], [both, lost, won, neither])
    b = np.repeat([True, False, True, False], [both, lost, won, neither])
    return a, b


def test_mcnemar_published():
    """statsmodels' documentation of `mcnemar`: [[101, 121], [59, 33]], exact, p = 4.434e-06."""
    test = stats.mcnemar(*outcomes(101, 121, 59, 33))
    assert (test.n, test.lost, test.won) == (314, 121, 59)
    assert test.p == pytest.approx(4.4344e-06, rel=1e-4)
    assert test.difference == pytest.approx(-62 / 314)


@pytest.mark.parametrize("lost, won", [(0, 0), (1, 0), (3, 9), (5, 5), (40, 12)])
def test_mcnemar_is_two_binomial_tails(lost, won):
    m = lost + won
    tail = sum(math.comb(m, k) for k in range(min(lost, won) + 1)) / 2**m
    assert stats.mcnemar(*outcomes(20, lost, won, 5)).p == pytest.approx(min(1.0, 2 * tail), rel=1e-12)


@pytest.mark.parametrize("table", [(101, 121, 59, 33), (80, 6, 1, 13), (10, 0, 9, 2)])
def test_mcnemar_against_statsmodels(table):
    module = pytest.importorskip("statsmodels.stats.contingency_tables")
    both, lost, won, neither = table
    expected = module.mcnemar([[both, lost], [won, neither]], exact=True).pvalue
    assert stats.mcnemar(*outcomes(*table)).p == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n, discordant, loss", [(200, 0.07, 0.02), (1000, 0.05, 0.02), (65, 0.2, 0.15), (40, 0.01, 0.02)])
def test_mcnemar_power_against_simulation(n, discordant, loss):
    random, runs, found = np.random.default_rng(1), 4000, 0
    discordant_, towards = max(discordant, loss), (1 + loss / max(discordant, loss)) / 2
    p_of: dict[tuple[int, int], float] = {}
    for _ in range(runs):
        m = random.binomial(n, discordant_)
        lost = random.binomial(m, towards)
        if (lost, m) not in p_of:
            p_of[lost, m] = scipy.stats.binomtest(lost, m).pvalue if m else 1.0
        found += p_of[lost, m] <= 0.05 and 2 * lost > m
    exact = stats.mcnemar_power(n, discordant, loss)
    assert exact == pytest.approx(found / runs, abs=4 * math.sqrt(0.25 / runs))


def test_mcnemar_power_of_many_pairs_is_the_normal_one():
    """Lachin (1992): with many discordant pairs the power tends to that of a normal test."""
    n, discordant, loss = 20_000, 0.1, 0.008
    sd0, sd1 = math.sqrt(discordant), math.sqrt(discordant - loss**2)
    normal = scipy.stats.norm.cdf((math.sqrt(n) * loss - 1.959964 * sd0) / sd1)
    assert stats.mcnemar_power(n, discordant, loss) == pytest.approx(normal, abs=0.01)


@pytest.mark.parametrize("n, discordant", [(394, 0.02), (1035, 0.05), (2043, 0.1), (4016, 0.2)])
def test_pairs_that_a_gate_needs(n, discordant):
    """docs/eval.md's table for 2 points."""
    assert stats.mcnemar_power(n - 20, discordant, 0.02) < 0.8 <= stats.mcnemar_power(n, discordant, 0.02)


def test_bootstrap_against_scipy():
    random = np.random.default_rng(0)
    size = random.integers(50, 500, 40).astype(float)
    a, b = size * random.normal(1.0, 0.1, 40), size * random.normal(1.05, 0.1, 40)
    found = stats.ratio(b, size, minus=a)
    tail = scipy.stats.norm.cdf(-math.sqrt(40 / 39) * 2.0226909)  # t(39) at 97.5 %, as tables have it
    expected = scipy.stats.bootstrap(
        (b, a, size), lambda x, y, z, axis: (x - y).sum(axis) / z.sum(axis), paired=True, vectorized=True, method="percentile",
        confidence_level=1 - 2 * tail, n_resamples=20_000, rng=1,
    )  # fmt: skip
    assert found.value == pytest.approx((b - a).sum() / size.sum(), rel=1e-12)
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.12 * found.error)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.12 * found.error)
    assert found.error == pytest.approx(expected.standard_error * math.sqrt(40 / 39), rel=0.03)


def test_bootstrap_is_seeded_and_paired():
    random = np.random.default_rng(0)
    hard = random.normal(0, 5, 50)  # what makes a text hard is shared by both models, and cancels in pairs
    a, b, n = hard + 3, hard + 3.1 + random.normal(0, 0.01, 50), np.ones(50)
    assert stats.ratio(b, n, minus=a) == stats.ratio(b, n, minus=a)
    assert stats.ratio(b, n, minus=a).error < 0.01 < stats.ratio(b, n).error
    assert stats.ratio(b, n, minus=a, seed=1).low != stats.ratio(b, n, minus=a).low


@pytest.mark.parametrize("units", [6, 60])
def test_bootstrap_covers(monkeypatch, units):
    """A 95 % interval of a mean holds the true mean in about 95 % of samples, of few units too (plain percentiles of 6 units: 82 %)."""
    monkeypatch.setattr(stats, "RESAMPLES", 1000)
    random, held, runs = np.random.default_rng(5), 0, 400
    for _ in range(runs):
        i = stats.ratio(random.normal(2.0, 1.0, units), np.ones(units))
        held += i.low <= 2.0 <= i.high
    assert held / runs == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / runs))


@pytest.mark.parametrize("units", [1, 5])
def test_few_units_say_nothing(units):
    i = stats.ratio([3.0] * units, [2.0] * units)
    assert i.value == 1.5 and (i.low, i.high) == (-math.inf, math.inf)
    assert not stats.power_of_interval("x", i).adequate
    with pytest.raises(ValueError, match="found none"):
        stats.ratio([], [])


def test_power_says_what_it_could_not_have_caught():
    small = stats.power_of_pairs("tool calls", stats.mcnemar(*outcomes(58, 1, 1, 5)))
    assert not small.adequate and "COULD NOT HAVE CAUGHT a loss of 2 points" in small.words
    large = stats.power_of_pairs("tool calls", stats.mcnemar(*outcomes(4800, 60, 60, 80)))
    assert large.adequate and "would have been caught" in large.words
    assert large.detectable < 0.02 < small.detectable


def test_no_discordant_pair_is_not_certainty():
    """65 of 65 equal outcomes look perfect, and a loss of 2 points would have looked the same in one of four runs."""
    found = stats.power_of_pairs("valid", stats.mcnemar(*outcomes(65, 0, 0, 0)))
    assert not found.adequate
    assert found.detectable == pytest.approx(0.118, abs=0.01)


def test_mean_power():
    assert stats.mean_power(0.01, 0.0, 30) == pytest.approx(0.025)
    assert stats.mean_power(0.02 / 2.8016, 0.02, 100_000) == pytest.approx(0.8, abs=1e-3)  # z(0.975) + z(0.8) = 2.8016
    assert stats.mean_power(1e-6, 0.02, 8) == 1.0
    assert stats.mean_power(0.0, 0.02, 8) == 1.0


def test_mean_power_against_simulation():
    random, units, error, loss = np.random.default_rng(2), 8, 0.02, 0.05
    x = random.normal(loss, error * math.sqrt(units), (20_000, units))
    test = scipy.stats.ttest_1samp(x, 0, axis=1)
    assert stats.mean_power(error, loss, units) == pytest.approx(np.mean((test.pvalue < 0.05) & (test.statistic > 0)), abs=0.015)


def test_mean_power_against_statsmodels():
    module = pytest.importorskip("statsmodels.stats.power")
    expected = module.TTestPower().power(effect_size=0.4, nobs=30, alpha=0.025, alternative="larger")
    assert stats.mean_power(1 / math.sqrt(30), 0.4, 30) == pytest.approx(expected, rel=1e-6)


def test_signed_rank():
    assert stats.signed_rank([0, 0]) == 1.0
    assert stats.signed_rank([1, 2, 3, 4, 5, 6, 7, 8]) == pytest.approx(2 / 2**8)
