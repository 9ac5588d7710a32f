"""Lists of the most probable tokens: exact when they are the whole vocabulary, a lower bound otherwise."""

import numpy as np
import pytest
import scipy.stats
import torch

from moet.eval import measure
from moet.eval.toplist import Top, compare

T, V = 40, 300


@pytest.fixture
def pair():
    g = torch.Generator().manual_seed(0)
    a = 3 * torch.randn(T, V, generator=g)
    return a, a + 0.5 * torch.randn(T, V, generator=g), torch.randint(0, V, (T,), generator=g)


def tops(pair, k):
    a, b, t = pair
    return Top.of_logits(a, k, t), Top.of_logits(b, k, t), t.numpy()


def test_whole_vocabulary(pair):
    whole, listed = measure.compare(*pair), compare(*tops(pair, V))
    np.testing.assert_allclose(listed.kl, whole.kl, rtol=1e-9)
    for name in ("agree", "ref_hit", "cand_hit"):
        assert (getattr(listed, name) == getattr(whole, name)).all()
    np.testing.assert_allclose(listed.ref_nll, whole.ref_nll, rtol=1e-12)
    np.testing.assert_allclose(listed.cand_nll, whole.cand_nll, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 5, 20, 100])
def test_lower_bound(pair, k):
    """Against scipy's entropy of the merged distribution, and never above the whole vocabulary's KL."""
    a, b, t = pair
    whole, listed = measure.compare(a, b, t), compare(*tops(pair, k))
    assert (listed.kl <= whole.kl + 1e-9).all() and (listed.kl >= -1e-9).all()
    assert (listed.agree == whole.agree).all()
    np.testing.assert_allclose(listed.cand_nll, whole.cand_nll, rtol=1e-12)
    p, q = a.double().softmax(-1).numpy(), b.double().softmax(-1).numpy()
    for i in range(T):
        named = [set(np.argsort(-x[i])[:k]) | {int(t[i])} for x in (p, q)]
        common = sorted(named[0] & named[1])
        merged = [np.append(x[i][common], 1 - x[i][common].sum()) for x in (p, q)]
        assert listed.kl[i] == pytest.approx(scipy.stats.entropy(*merged), rel=1e-6, abs=1e-9)


def test_from_what_a_server_prints(pair):
    a, _, t = pair
    top = Top.of_logits(a, 5, t)
    rows = [{int(i): float(x) for i, x in zip(ids, logprobs, strict=True) if i >= 0} for ids, logprobs in zip(top.ids, top.logprobs, strict=True)]
    assert (compare(Top.of(rows), top, t.numpy()).kl == 0).all()


def test_rounding_is_seen_as_noise(pair):
    """Lists in float32, of nearly all of the probability, against themselves in float64."""
    a, _, t = pair
    exact = Top.of_logits(3 * a, 30, t)
    rounded = Top(exact.ids, exact.logprobs.astype(np.float32).astype(float))
    left = 1 - np.exp(exact.logprobs).sum(1)
    assert left.min() < 1e-6 < left.max()
    assert np.abs(compare(exact, rounded, t.numpy()).kl).max() < 2e-10


def test_a_target_that_is_missing():
    with pytest.raises(ValueError, match="next token, 7"):
        compare(Top.of([{1: -0.1}]), Top.of([{1: -0.1}]), np.array([7]))
