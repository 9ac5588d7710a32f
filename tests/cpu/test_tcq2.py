"""tcq2's reference encoder: against all codes there are, on words short enough to try them; and what it gives on a
Gaussian."""

import itertools

import numpy as np
import pytest

from moet.numerics import TCQ2_LEVELS, decode_tcq2
from moet.quantize.reference_tcq2 import encode_codes, pack_codes


def errors_of(values, codes, scales):
    return ((values - decode_tcq2(pack_codes(codes), values.shape[1]) * np.repeat(scales, 32, axis=1)[:, : values.shape[1]]) ** 2).sum(axis=1)


@pytest.mark.parametrize("cols", [1, 2, 5, 7])
def test_search_finds_the_best_of_all_codes(cols):
    rng = np.random.default_rng(cols)
    values, scales = rng.standard_normal((20, cols)), np.full((20, 1), 0.2)
    every = np.array(list(itertools.product(range(4), repeat=cols)), np.uint8)
    levels = decode_tcq2(pack_codes(every), cols) * 0.2
    least = ((values[:, None] - levels) ** 2).sum(axis=2).min(axis=1)
    np.testing.assert_allclose(errors_of(values, encode_codes(values, scales), scales), least, rtol=1e-12)


def test_search_ends_a_whole_word_as_the_format_does():
    """All codes of the last six columns, the ten before them kept: no end does better."""
    rng = np.random.default_rng(3)
    values, scales = rng.standard_normal((20, 16)), np.full((20, 1), 0.17)
    codes = encode_codes(values, scales)
    found = errors_of(values, codes, scales)
    for end in itertools.product(range(4), repeat=6):
        other = codes.copy()
        other[:, 10:] = end
        assert (errors_of(values, other, scales) >= found - 1e-12).all()


def test_weights_choose_what_matters():
    rng = np.random.default_rng(4)
    values, scales = rng.standard_normal((50, 32)), np.full((50, 1), 0.2)
    weights = np.ones((50, 32))
    weights[:, ::2] = 1e6
    first, second = (decode_tcq2(pack_codes(encode_codes(values, scales, w)), 32) * 0.2 - values for w in (None, weights))
    assert (second[:, ::2] ** 2).sum() < (first[:, ::2] ** 2).sum() and (second**2).sum() > (first**2).sum()


def test_negated_values_give_complemented_codes():
    rng = np.random.default_rng(5)
    values, scales = rng.standard_normal((40, 64)), np.full((40, 2), 0.2)
    assert np.array_equal(encode_codes(-values, scales), 3 - encode_codes(values, scales))


def test_error_on_a_gaussian():
    """The number that chose the format: 0.0986 with one scale for all, where four free levels give 0.1175."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal((2000, 32))
    least = min(
        errors_of(values, encode_codes(values, np.full((2000, 1), s)), np.full((2000, 1), s)).mean() / 32
        for s in np.arange(0.13, 0.17, 0.005)
    )
    assert 0.096 < least < 0.102
    assert np.abs(TCQ2_LEVELS).max() == 15
