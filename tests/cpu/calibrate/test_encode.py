"""The solver: what its numbers mean, against other ways to compute them."""

import itertools

import numpy as np
import pytest
import torch

from moet.calibrate import trellis
from moet.calibrate.encode import DAMPING, encode_matrix, feedback, fitted
from moet.calibrate.scalar import Scalar
from moet.calibrate.trellis import LEVELS, Trellis

CODEBOOKS = [Trellis(), Trellis(portable=True), Scalar(), Scalar((-3.5, -1.0, 1.0, 3.5), "ue5m3"), Scalar(scale="real")]


def case(count: int, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, inputs that are correlated, and their Hessian."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, rows, columns, generator=g) * 0.02
    mix = torch.randn(count, columns, columns, generator=g)
    inputs = torch.randn(count, 4 * columns, columns, generator=g) @ mix
    return weight, inputs, inputs.mT @ inputs / inputs.shape[1]


def damped(hessian: torch.Tensor) -> torch.Tensor:
    out = hessian.double().clone()
    out.diagonal(dim1=1, dim2=2).add_(DAMPING * hessian.double().diagonal(dim1=1, dim2=2).mean(1)[:, None])
    return out


def output_error(values: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    d = (values - target).double()
    return torch.einsum("gnk,gkj,gnj->g", d, hessian, d)


@pytest.mark.parametrize("codebook", CODEBOOKS, ids=str)
@pytest.mark.parametrize("shape", [(2, 37, 64), (1, 16, 40), (3, 9, 160)])
def test_error_feedback_lowers_the_output_error(codebook, shape):
    weight, _, hessian = case(*shape)
    calibrated = encode_matrix(codebook, weight, hessian)
    rounded = encode_matrix(codebook, weight)
    assert calibrated.codes.shape == weight.shape and calibrated.scales.shape == (*shape[:2], -(-shape[2] // 32))
    ratio = output_error(calibrated.values, weight, damped(hessian)) / output_error(rounded.values, weight, damped(hessian))
    assert (ratio < 0.75).all(), ratio


@pytest.mark.parametrize("codebook", CODEBOOKS, ids=str)
def test_a_blocks_errors_add_up_to_the_output_error(codebook):
    """sum of errors^2 = tr (W - Q) H (W - Q)^T: the search minimises what it is meant to."""
    weight, _, hessian = case(2, 24, 32)
    block = codebook.block(weight, feedback(hessian), codebook.multiplier(weight))
    wanted = output_error(block.values, weight, damped(hessian))
    torch.testing.assert_close(block.errors.double().square().sum((1, 2)), wanted, rtol=2e-4, atol=0)


def test_feedback_is_the_factor_of_the_inverse():
    _, _, hessian = case(2, 1, 48)
    upper = feedback(hessian).double()
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.mT @ upper @ damped(hessian), torch.eye(48).double().expand(2, -1, -1), rtol=0, atol=5e-3)


def test_the_target_is_the_ridge_regression():
    weight, inputs, hessian = case(1, 5, 24)
    outputs = torch.randn(1, inputs.shape[1], 5, generator=torch.Generator().manual_seed(3))
    found = fitted(weight, hessian, outputs.mT @ inputs / inputs.shape[1], 0.1)
    n = inputs.shape[1]
    amount = 0.1 * hessian[0].diagonal().mean().item() * n
    rows = np.concatenate([inputs[0].double(), np.sqrt(amount) * np.eye(24)])
    right = np.concatenate([outputs[0].double(), np.sqrt(amount) * weight[0].double().mT])
    expected = np.linalg.lstsq(rows, right, rcond=None)[0].T
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_inputs_of_nearly_nothing_are_not_fitted_to():
    """An expert whose gate is zero: no weights turn its inputs into what is missing elsewhere."""
    weight, inputs, _ = case(2, 5, 24)
    inputs[1] *= 1e-12
    outputs = torch.randn(2, inputs.shape[1], 5, generator=torch.Generator().manual_seed(3))
    wanted, hessian = (x.mT @ inputs / inputs.shape[1] for x in (outputs, inputs))
    found = fitted(weight, hessian, wanted, 0.1)
    assert torch.equal(found[1], weight[1]) and not torch.equal(found[0], weight[0])


def test_inputs_that_never_were_do_not_break_it():
    weight, _, hessian = case(1, 8, 64)
    hessian[:, 5] = hessian[:, :, 5] = 0
    found = encode_matrix(Trellis(), weight, hessian)
    assert found.values.isfinite().all()
    assert encode_matrix(Trellis(), weight, torch.zeros_like(hessian)).values.isfinite().all()


@pytest.mark.parametrize("columns", [32, 31, 18, 17, 16, 15, 3, 1])
def test_native_and_tensor_searches_agree(columns):
    weight, _, hessian = case(2, 21, columns, seed=columns)
    upper, multiplier = feedback(hessian), Trellis().multiplier(weight)
    tensor = trellis._tensor_block(weight, upper, multiplier)
    native = trellis._native_block(weight, upper, multiplier)
    portable = trellis._native_block(weight, upper, multiplier, portable=True)
    for a, b in ((native, portable), (native, tensor)):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and torch.equal(a.values, b.values)
    assert torch.equal(native.errors, portable.errors)
    torch.testing.assert_close(native.errors, tensor.errors, rtol=1e-4, atol=1e-5)


def levels_of(codes: tuple[int, ...], columns: int) -> list[float]:
    """By the text of docs/row-format.md: an arithmetic shift of the 32-bit word."""
    word = sum(c << (2 * i) for i, c in enumerate(codes))
    word -= (word >> 31) << 32
    return [LEVELS[word >> (2 * k) & 15] for k in range(columns)]


def test_the_search_finds_the_best_path():
    """Brute force over all codes of a short word, at every scale tried."""
    columns = 5
    target = torch.randn(1, 6, columns, generator=torch.Generator().manual_seed(1))
    multiplier = Trellis().multiplier(target)
    found = trellis._native_block(target, torch.eye(columns)[None], multiplier)
    paths = np.array([levels_of(c, columns) for c in itertools.product(range(4), repeat=columns)])
    for r in range(6):
        tried = trellis.scale_bytes((target[0, r].abs().max() * trellis.shares())[None], multiplier)
        scale = trellis.scale_values(tried, multiplier)[0]
        errors = np.square(scale.double().numpy()[:, None, None] * paths - target[0, r].double().numpy()).sum(2)
        got = (found.values[0, r] - target[0, r]).double().square().sum().item()
        assert got == pytest.approx(errors.min(), rel=1e-5)


def test_a_whole_words_end_repeats_the_sign():
    weight, _, hessian = case(1, 40, 64, seed=9)
    found = encode_matrix(Trellis(), weight, hessian)
    scale = trellis.scale_values(found.scales, found.multiplier).repeat_interleave(32, 2)
    for r in range(40):
        levels = [x for w in range(4) for x in levels_of(tuple(found.codes[0, r, 16 * w : 16 * w + 16].tolist()), 16)]
        assert torch.equal(found.values[0, r], torch.tensor(levels) * scale[0, r])


def test_outliers_that_matter_are_reached():
    """An input ten times the others', and a weight five deviations out on it: no candidate may clip it."""
    weight, _, hessian = case(1, 64, 64, seed=4)
    weight[:, :, 7] = 0.1
    hessian[:, 7] *= 10
    hessian[:, :, 7] *= 10
    found = encode_matrix(Trellis(), weight, hessian).values[0, :, 7]
    assert (found / 0.1 - 1).abs().mean() < 0.06


def test_zeros_take_their_sign():
    """Else a checkpoint with many of them, as E2M1 ones are, gets a sign bias."""
    weight = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(2)).mul(3).round()
    weight = torch.where(weight == 0, torch.zeros(()).copysign(torch.randn(weight.shape)), weight)
    values = encode_matrix(Scalar(), weight).values
    zero = weight == 0
    assert zero.sum() > 100 and torch.equal(torch.signbit(values[zero]), torch.signbit(weight[zero]))


def test_complements_negate():
    assert all(LEVELS[15 - i] == -LEVELS[i] for i in range(16))
    weight, _, hessian = case(1, 16, 64)
    a, b = encode_matrix(Trellis(), weight, hessian), encode_matrix(Trellis(), -weight, hessian)
    assert torch.equal(a.values, -b.values) and torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("codebook", CODEBOOKS[:3], ids=str)
@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_sizes_of_numbers_do_not_matter(codebook, size):
    """Powers of two apart, the codes are the same; rows of zeros stay near zero."""
    weight, _, hessian = case(1, 8, 64)
    weight[:, 3] = 0
    scaled = encode_matrix(codebook, weight * float(2.0 ** round(np.log2(size))), hessian)
    plain = encode_matrix(codebook, weight, hessian)
    live = [r for r in range(8) if r != 3]
    assert torch.equal(scaled.codes[:, live], plain.codes[:, live])
    assert plain.values[:, 3].abs().max() <= 2.0**-10 * weight.abs().max()
