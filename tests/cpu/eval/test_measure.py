"""`measure` against scipy, and against lm-eval's own functions where it is installed."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from moet.eval import measure


def logits(seed: int, *shape: int, spread: float = 4.0) -> torch.Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_against_scipy():
    a, b = logits(0, 3, 17, 501), logits(1, 3, 17, 501)
    targets = torch.randint(0, 501, (3, 17), generator=torch.Generator().manual_seed(2))
    found = measure.compare(a, b, targets)
    p, q = (scipy.special.softmax(x.double().numpy(), axis=-1).reshape(-1, 501) for x in (a, b))
    np.testing.assert_allclose(found.kl, scipy.stats.entropy(p, q, axis=-1), rtol=1e-12)
    at = np.arange(51), targets.numpy().reshape(-1)
    np.testing.assert_allclose(found.ref_nll, -np.log(p[at]), rtol=1e-12)
    np.testing.assert_allclose(found.cand_nll, -np.log(q[at]), rtol=1e-12)
    assert (found.agree == (p.argmax(-1) == q.argmax(-1))).all()
    assert (found.ref_hit == (p.argmax(-1) == at[1])).all()
    assert (found.cand_hit == (q.argmax(-1) == at[1])).all()


def test_golden_numbers():
    """Two distributions by hand: KL((1/2, 1/4, 1/4) || (1/4, 1/4, 1/2)) = ln 2 / 4."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    found = measure.compare(p, q, torch.tensor([2]))
    assert found.kl[0] == pytest.approx(math.log(2) / 4, rel=1e-6)
    assert not found.agree[0] and not found.ref_hit[0] and found.cand_hit[0]
    sums = measure.Sums.of(found, 4)
    assert measure.bits_per_byte(sums.ref_nll, sums.bytes) == pytest.approx(0.5)
    assert measure.perplexity(sums.cand_nll, sums.tokens) == pytest.approx(2)


def test_noise_is_seen_as_noise():
    """A difference of float32's last bit gives a KL of its square, not of its size: the reason for float64 inside."""
    a = logits(3, 8, 50_000)
    b = torch.nextafter(a, torch.full_like(a, torch.inf))
    found = measure.compare(a, b, torch.zeros(8, dtype=torch.int64))
    assert np.abs(found.kl).max() < 1e-12
    assert found.agree.all()


def test_slices_do_not_show(monkeypatch):
    a, b, t = logits(4, 29, 40), logits(5, 29, 40), torch.zeros(29, dtype=torch.int64)
    whole = measure.compare(a, b, t)
    monkeypatch.setattr(measure, "SLICE_BYTES", 8 * 40 * 7)
    sliced = measure.compare(a, b, t)
    assert (whole.kl == sliced.kl).all() and len(sliced) == 29


def test_excluded_tokens():
    p = torch.tensor([[0.0, 1.0, -torch.inf]])
    q = torch.tensor([[0.0, 1.0, 2.0]])
    t = torch.tensor([0])
    assert math.isfinite(measure.compare(p, q, t).kl[0])
    assert measure.compare(q, p, t).kl[0] == math.inf


def test_wrong_shapes_and_nan():
    with pytest.raises(ValueError, match=r"\[.., vocab\] twice"):
        measure.compare(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="NaN"):
        measure.compare(torch.full((1, 3), torch.nan), torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    assert len(measure.compare(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))) == 0


def test_against_lm_eval():
    """lm-eval's aggregations of (loglikelihood, weight) over documents: perplexity by tokens, bits per byte by bytes."""
    metrics = pytest.importorskip("lm_eval.api.metrics")
    texts = ["alpha", "beta, gamma", "δ ε ζ"]
    scores = [measure.compare(x := logits(i, 5 + i, 33), x, torch.arange(5 + i)) for i, _ in enumerate(texts)]
    sums = [measure.Sums.of(s, len(t.encode())) for s, t in zip(scores, texts, strict=True)]
    nats, tokens, size = (sum(getattr(s, k) for s in sums) for k in ("ref_nll", "tokens", "bytes"))
    assert metrics.weighted_perplexity([(-s.ref_nll, s.tokens) for s in sums]) == pytest.approx(measure.perplexity(nats, tokens), rel=1e-12)
    assert metrics.bits_per_byte([(-s.ref_nll, s.bytes) for s in sums]) == pytest.approx(measure.bits_per_byte(nats, size), rel=1e-12)
