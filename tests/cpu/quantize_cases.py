"""Matrices that are hard to encode: every row its own kind of trouble, in any native format."""

from types import SimpleNamespace

import numpy as np

from moet.checkpoint.weights import Matrix
from moet.layout import RowGeometry, unpack_row
from moet.quantize import encode_row

FORMATS = ("mxfp4", "nvfp4", "fp8", "fp8_row", "bf16")
KINDS = ("random", "zeros", "negative zeros", "mixed zeros", "equal", "outlier", "smallest", "largest", "threes", "few small", "sparse")
SCALE_KINDS = ("usual", "lowest", "highest", "mixed")
BITS = {"mxfp4": 4, "nvfp4": 4, "fp8": 8, "fp8_row": 8, "bf16": 16}


def code_row(rng: np.random.Generator, bits: int, kind: str, cols: int) -> np.ndarray:
    """Codes of one row as integers: magnitude, plus a sign in the top bit."""
    top = 1 << bits - 1
    finite = {4: 7, 8: 0x7E, 16: 0x7F7F}[bits]  # the largest magnitude
    signs = rng.integers(0, 2, cols) * top
    magnitudes = rng.integers(0, finite + 1, cols)
    if bits == 16 and kind == "random":
        magnitudes = (np.abs(rng.standard_normal(cols)).astype(np.float32).view(np.uint32) >> 16).astype(np.int64)
    if kind in ("zeros", "negative zeros", "mixed zeros"):
        signs = {"zeros": 0 * signs, "negative zeros": 0 * signs + top, "mixed zeros": signs}[kind]
        magnitudes = 0 * magnitudes
    elif kind == "equal":
        magnitudes[:] = rng.integers(1, finite + 1)
    elif kind == "outlier":
        magnitudes = rng.integers(0, 2, cols)
        magnitudes[rng.integers(cols)] = rng.integers(1, finite + 1)
    elif kind == "smallest":
        magnitudes = rng.integers(0, 2, cols)
    elif kind == "largest":
        magnitudes[:] = finite
    elif kind == "threes":
        magnitudes[:] = {4: 5, 8: 0x44, 16: 0x4040}[bits]  # 3: as near to 2 as to 4
        magnitudes[rng.integers(cols)] = rng.integers(0, {4: 6, 8: 0x45, 16: 0x4041}[bits])
    elif kind == "few small":
        magnitudes = rng.integers(0, {4: 5, 8: 9, 16: 0x90}[bits], cols)  # subnormals of E4M3 and BF16 among them
    elif kind == "sparse":
        magnitudes[rng.random(cols) < 0.9] = 0
    return magnitudes + signs


def hard_matrix(seed: int, format: str, rows: int, cols: int, kinds: list[str], scale_kind: str, multiplier: float = 1.0) -> Matrix:
    """Row r is of kind kinds[r % len(kinds)]."""
    rng, bits = np.random.default_rng(seed), BITS[format]
    codes = np.stack([code_row(rng, bits, kinds[r % len(kinds)], cols) for r in range(rows)])
    if bits == 4:
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    else:
        packed = codes.astype({8: np.uint8, 16: np.uint16}[bits]).view(np.uint8)
    choose = {"usual": 0, "lowest": 1, "highest": 2, "mixed": None}[scale_kind]
    groups = -(-cols // 32)
    if format == "mxfp4":
        sets = [range(100, 130), range(0, 8), range(247, 255)]
        scales = _scales(rng, sets, choose, (rows, groups)).astype(np.uint8)
    elif format == "nvfp4":
        sets = [range(0x20, 0x7F), range(0, 9), range(0x70, 0x7F)]
        scales = _scales(rng, sets, choose, (rows, cols // 16)).astype(np.uint8)
    elif bits == 8:
        exponents = [range(-14, -2), range(-149, -140), range(120, 128)]
        shape = (-(-rows // 32), groups) if format == "fp8" else (rows,)
        mantissas = [1.0, 1.5, 1.999, -1.25, 0.0] if scale_kind == "mixed" else [1.0, 1.5, 1.999]
        scales = np.ldexp(rng.choice(mantissas, shape), _scales(rng, exponents, choose, shape)).astype(np.float32)
    else:
        scales = None
    return Matrix(format, rows, cols, np.ascontiguousarray(packed), scales, float(np.float32(multiplier)) if format == "nvfp4" else 1.0)


def _scales(rng: np.random.Generator, sets: list[range], choose: int | None, shape: tuple[int, ...]) -> np.ndarray:
    values = np.concatenate([np.array(s) for s in (sets if choose is None else [sets[choose]])])
    return rng.choice(values, shape)


def encode_matrix(matrix: Matrix, *, portable: bool = False):
    """Codes uint8 [rows, cols], scales uint8 [rows, ceil(cols / 32)] and report of a square matrix, through a whole row, as gate and as down."""
    assert matrix.rows == matrix.cols
    geometry = RowGeometry("sym2", matrix.cols, matrix.rows, False)
    row = np.full(geometry.row_bytes, 0x5A, np.uint8)
    expert = SimpleNamespace(layer=7, expert=11, gate=matrix, up=matrix, down=matrix)
    report = encode_row(geometry, expert, row, portable=portable)
    results = []
    for found in unpack_row(geometry, row):
        codes = np.stack([found.codes >> s & 3 for s in (0, 2, 4, 6)], axis=2).reshape(found.rows, -1)[:, : found.cols]
        results.append((codes, found.scales))
    for codes, scales in results[1:]:
        assert np.array_equal(codes, results[0][0]) and np.array_equal(scales, results[0][1])
    assert report.gate == report.up == report.down
    return *results[0], report.gate, row
