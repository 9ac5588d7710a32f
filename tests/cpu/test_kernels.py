"""The expert MLP kernels against the float64 reference, and against each other bit for bit."""

import numpy as np
import pytest
from layout_cases import random_expert, sizes_for

from moet.kernels import ACTIVATIONS, Threads, expert_mlp, isa, set_isa
from moet.kernels.expert_mlp import reference
from moet.layout import FORMATS, RowGeometry, dequantize_row, pack_row
from moet.models import Activation

SWIGLU = Activation()
CLAMPED = Activation("swiglu", 7.0)
OAI = Activation("swiglu_oai", 7.0, 1.702)

# Largest error of a result relative to the magnitudes that it sums (reference.expert_mlp(magnitude=True)). Float32 sums of 32 products and then
# of groups have a relative error of some 2^-24 a step, of random sign. Integer activations are off by half a unit of their last place of the group's
# largest value, which matters to a small value beside an outlier: up to 32 / 2 / 2^15 (2 bytes) and 32 / 2 / 127 (1 byte) of the magnitudes.
TOLERANCE = {"fp32": 4e-7, "int24": 4e-7, "int16": 1.5e-4, "int8": 4e-2}


def make_row(geometry: RowGeometry, seed: int = 0) -> np.ndarray:
    expert = random_expert(geometry, seed)
    row = np.empty(geometry.row_bytes, np.uint8)
    pack_row(geometry, expert.gate, expert.up, expert.down, row)
    return row


def make_x(tokens: int, hidden: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    x[:, rng.integers(0, hidden, max(1, hidden // 50))] *= 40   # outlier channels, as hidden states have them
    return x


@pytest.fixture(autouse=True)
def automatic_isa():
    yield
    set_isa("auto")


def all_isas() -> list[str]:
    names = []
    for name in ("portable", "avx2", "avx512"):
        try:
            set_isa(name)
            names.append(name)
        except Exception:
            continue
    set_isa("auto")
    return names


@pytest.mark.parametrize("format", FORMATS)
def test_reference_decoder_agrees_with_layout(format: str) -> None:
    geometry = RowGeometry(format, *sizes_for(format)[-1], True)
    row = make_row(geometry)
    decoded = reference.decode_row(geometry, row)[:3]
    for mine, theirs in zip(decoded, dequantize_row(geometry, row), strict=True):
        np.testing.assert_array_equal(mine[: theirs.shape[0], : theirs.shape[1]].astype(np.float32), theirs)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED, OAI], ids=["swiglu", "clamped", "oai"])
@pytest.mark.parametrize("format", FORMATS)
def test_values(format: str, activation: Activation, activations: str) -> None:
    for seed, (hidden, inter) in enumerate(sizes_for(format)):
        geometry = RowGeometry(format, hidden, inter, seed % 2 == 1)
        row, x = make_row(geometry, seed), make_x(7, hidden, seed)
        found = expert_mlp(geometry, row, x, activation, activations=activations)
        expected = reference.expert_mlp(geometry, row, x, activation)
        size = reference.expert_mlp(geometry, row, x, activation, magnitude=True)
        error = np.max(np.abs(found - expected) / size)
        assert error < TOLERANCE[activations], (hidden, inter, error)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_same_bits_on_every_isa_batch_and_thread_count(format: str, activations: str) -> None:
    hidden, inter = sizes_for(format)[3]
    geometry = RowGeometry(format, hidden, inter, True)
    row, x = make_row(geometry), make_x(101, hidden)   # 101 tokens: two passes of 48, a group of four and one left over
    whole = expert_mlp(geometry, row, x, CLAMPED, activations=activations)
    assert np.isfinite(whole).all()
    for name in all_isas():
        set_isa(name)
        with Threads(3) as threads:
            assert expert_mlp(geometry, row, x, CLAMPED, activations=activations, threads=threads).tobytes() == whole.tobytes(), name
            for tokens in ([0], [100], range(5), range(40, 93)):
                part = expert_mlp(geometry, row, np.ascontiguousarray(x[list(tokens)]), CLAMPED, activations=activations, threads=threads)
                assert part.tobytes() == whole[list(tokens)].tobytes(), (name, tokens)


@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4", "nvfp4"])
def test_groups_without_lowest_digits_take_the_short_path_to_the_same_sum(format: str) -> None:
    """Values from bfloat16 mostly need two of int24's three bytes. A token's bits must not depend on whether its neighbours need the third."""
    geometry = RowGeometry(format, 192, 96, False)
    row, x = make_row(geometry), make_x(8, 192)
    x[::2] = (x[::2].view(np.uint32) & 0xFFFF0000).view(np.float32)
    found = expert_mlp(geometry, row, x, SWIGLU, activations="int24")
    expected, size = (reference.expert_mlp(geometry, row, x, SWIGLU, magnitude=m) for m in (False, True))
    assert np.max(np.abs(found - expected) / size) < TOLERANCE["int24"]
    for t in range(8):
        assert expert_mlp(geometry, row, x[t : t + 1], SWIGLU, activations="int24").tobytes() == found[t : t + 1].tobytes()
    short = expert_mlp(geometry, row, np.ascontiguousarray(x[::2]), SWIGLU, activations="int24")   # four at once, most groups short
    assert short.tobytes() == found[::2].tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_ranks_add_up(format: str) -> None:
    hidden, inter = sizes_for(format)[3]
    geometry = RowGeometry(format, hidden, inter, True)
    row, x = make_row(geometry), make_x(5, hidden)
    whole = expert_mlp(geometry, row, x, OAI)
    size = reference.expert_mlp(geometry, row, x, OAI, magnitude=True)
    for world in (1, 2, 3):
        parts = [expert_mlp(geometry, row, x, OAI, rank=rank, world=world) for rank in range(world)]
        for rank, part in enumerate(parts):
            expected = reference.expert_mlp(geometry, row, x, OAI, rank=rank, world=world)
            assert np.max(np.abs(part - expected) / size) < TOLERANCE["fp32"]
        assert np.max(np.abs(np.sum(parts, axis=0) - whole) / size) < TOLERANCE["fp32"]


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4", "nvfp4"])
def test_extreme_codes_and_activations(format: str, activations: str) -> None:
    """All weights and all activations at their largest: the 16- and 32-bit sums must not overflow, in either sign."""
    geometry = RowGeometry(format, 128, 64, False)
    row = make_row(geometry)
    for code in (0x00, 0xFF, 0x77, 0x55, 0xAA):   # sym2: -4, 4, mixed; E2M1: 0, -6, 6; tcq2: 0x55 is -15 but for the word's end, 0xAA 15
        blocks = row[: geometry.extras_offset].reshape(-1, geometry.block_bytes)
        blocks[:, : geometry.block_code_bytes] = code
        for x in (np.full((5, 128), 1.9999999, np.float32), np.full((5, 128), -1.9999999, np.float32), np.full((5, 128), 2e-39, np.float32)):
            found = expert_mlp(geometry, row, x, SWIGLU, activations=activations)
            expected = reference.expert_mlp(geometry, row, x, SWIGLU)
            size = reference.expert_mlp(geometry, row, x, SWIGLU, magnitude=True)
            assert np.max(np.abs(found - expected) / (size + 1e-37)) < TOLERANCE[activations], (code, x[0, 0])


@pytest.mark.parametrize("format", ["sym2", "tcq2", "mxfp4"])
def test_scale_exponents_from_end_to_end(format: str) -> None:
    """UE8M0's byte 0 is 2^-127, a subnormal; large ones must not overflow where the product does not. All bytes of UE5M3 are ordinary."""
    geometry = RowGeometry(format, 64, 32, False)
    row = make_row(geometry)
    blocks = row[: geometry.extras_offset].reshape(-1, geometry.block_bytes)
    ends = ((0, 1e10), (1, 1e10), (140, 1), (255, 1e-3)) if format == "tcq2" else ((0, 1e30), (1, 1e30), (140, 1e-10), (200, 1e-30))
    for byte, scale in ends:
        blocks[:, geometry.block_code_bytes :] = byte
        x = make_x(3, 64) * np.float32(scale)
        for activations in ACTIVATIONS[:1] + ACTIVATIONS[2:]:
            found = expert_mlp(geometry, row, x, SWIGLU, activations=activations)
            with np.errstate(over="ignore"):
                expected = reference.expert_mlp(geometry, row, x, SWIGLU)
                size = reference.expert_mlp(geometry, row, x, SWIGLU, magnitude=True)
            assert np.max(np.abs(found - expected) / (size + 1e-37)) < TOLERANCE[activations], (byte, activations)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_token_that_is_not_finite_says_so_and_spoils_no_other(activations: str) -> None:
    geometry = RowGeometry("sym2", 64, 32, False)
    row, x = make_row(geometry), make_x(3, 64)
    clean = expert_mlp(geometry, row, x, SWIGLU, activations=activations)
    x[1, 5] = np.nan
    found = expert_mlp(geometry, row, x, SWIGLU, activations=activations)
    assert np.isnan(found[1]).all()
    assert found[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


@pytest.mark.parametrize("format", ["sym2", "tcq2"])
def test_padded_intermediate_values_reach_nothing(format: str) -> None:
    """A code word of zeros is no zero: with scales as large as they get, the padded columns of down would show."""
    geometry = RowGeometry(format, 64, 40, False)
    row, x = make_row(geometry), make_x(5, 64)
    for projection, part in (("w13", row[: geometry.w2_offset]), ("w2", row[geometry.w2_offset : geometry.extras_offset])):
        tile = part.reshape(geometry.tiles, -1, geometry.block_bytes)[-1]
        codes, scales = tile[:, : geometry.block_code_bytes].reshape(-1, 2, 64, 4), tile[:, geometry.block_code_bytes :]
        if projection == "w13":
            codes[:, :, [*range(8, 32), *range(40, 64)]] = 0xFF
            scales[:, [*range(8, 32), *range(40, 64)]] = 160
        else:
            codes[:, 0, :, 2:] = codes[:, 1] = 0xFF
    expected, size = (reference.expert_mlp(geometry, row, x, SWIGLU, magnitude=m) for m in (False, True))
    for activations in ACTIVATIONS:
        assert np.max(np.abs(expert_mlp(geometry, row, x, SWIGLU, activations=activations) - expected) / size) < TOLERANCE[activations]


def test_unknown_isa_lists_the_known() -> None:
    with pytest.raises(Exception, match="portable, avx2 or avx512"):
        set_isa("sse9")
    assert isa() in ("portable", "avx2", "avx512")
