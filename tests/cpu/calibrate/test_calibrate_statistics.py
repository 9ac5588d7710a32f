"""Second moments and how they are blended."""

import pytest

torch = pytest.importorskip("torch")

from moet.calibrate.statistics import Moments, blended


def moments(inputs, outputs=None, weights=None, step=7) -> Moments:
    found = Moments.zeros(inputs.shape[1], inputs.device, 0 if outputs is None else outputs.shape[1])
    for at in range(0, len(inputs), step):
        part = slice(at, at + step)
        some = (None if x is None else x[part] for x in (outputs, weights))
        found.add(inputs[part], *some)
    return found


def test_moments_are_the_weighted_sums():
    x, y, w = torch.randn(50, 6), torch.randn(50, 4), torch.rand(50)
    found = moments(x, y, w)
    own = torch.einsum("n,ni,nj->ij", w.double() ** 2, x.double(), x.double())
    wanted = torch.einsum("n,ni,nj->ij", w.double() ** 2, y.double(), x.double())
    assert torch.allclose(found.own.double(), own, atol=1e-4)
    assert torch.allclose(found.wanted.double(), wanted, atol=1e-4)
    assert found.count == 50 and found.weight == pytest.approx((w.double() ** 2).sum().item())


def test_shared_moments_count_as_tokens():
    """Blending is the mean over the expert's tokens and `prior` tokens that are like the layer's."""
    x, all_tokens = torch.randn(30, 5), torch.randn(400, 5)
    own, wanted = blended(moments(x), moments(all_tokens), prior=10)
    expected = (x.T @ x + 10 * all_tokens.T @ all_tokens / 400) / 40
    assert torch.allclose(own, expected, atol=1e-5) and wanted is None


def test_the_scale_of_router_weights_does_not_count():
    x, shared = torch.randn(30, 5), moments(torch.randn(400, 5))
    small, large = (blended(moments(x, weights=torch.full((30,), v)), shared)[0] for v in (0.1, 2.0))
    assert torch.allclose(small, large, atol=1e-5)


def test_an_expert_without_tokens_has_the_shared_ones():
    shared = moments(torch.randn(400, 5), torch.randn(400, 3))
    own, wanted = blended(moments(torch.zeros(0, 5), torch.zeros(0, 3), torch.zeros(0)), shared)
    assert torch.equal(own, shared.mean("own")) and torch.equal(wanted, shared.mean("wanted"))
