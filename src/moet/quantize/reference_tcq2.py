"""`tcq2` codes in plain numpy, float64: the exact search that other encoders are held against. docs/row-format.md is the
format."""

import numpy as np

from moet.numerics.tcq2 import TCQ2_LEVELS, WORD_CODES

_TERMINAL = np.array([0, 0, 3, 3])  # the code that a whole word's last code sees behind it: its high bit, twice


def encode_codes(values: np.ndarray, scales: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The codes of least squared error of every word, uint8 [rows, cols], 0 to 3; ties go to the smaller code, from a
    word's first column on.

    values: float64 [rows, cols]. scales: float64 [rows, ceil(cols / 32)], multiplier included. weights: of the squared
    errors, float64 [rows, cols] or None for ones. Codes past the last column are zero, and the search knows it.
    """
    rows, cols = values.shape
    codes = np.empty((rows, cols), np.uint8)
    each = np.repeat(scales, 32, axis=1)[:, :cols]
    errors = (values[..., None] - each[..., None] * TCQ2_LEVELS) ** 2
    if weights is not None:
        errors *= weights[..., None]
    for start in range(0, cols, WORD_CODES):
        stop = min(start + WORD_CODES, cols)
        codes[:, start:stop] = _word(errors[:, start:stop])
    return codes


def _word(errors: np.ndarray) -> np.ndarray:
    """Viterbi from the word's end: errors float64 [rows, columns, window] -> codes [rows, columns]. The state is a code, and
    `best` what the columns from it on cost at least."""
    rows, columns, _ = errors.shape
    at = errors.reshape(rows, columns, 4, 4)  # [next code, code]
    last = _TERMINAL if columns == WORD_CODES else np.zeros(4, int)
    best = at[:, -1, last, np.arange(4)]
    following = np.empty((rows, columns, 4), np.uint8)
    for k in range(columns - 2, -1, -1):
        costs = at[:, k] + best[:, :, None]
        following[:, k] = costs.argmin(axis=1)
        best = costs.min(axis=1)
    codes = np.empty((rows, columns), np.uint8)
    codes[:, 0] = best.argmin(axis=1)
    for k in range(1, columns):
        codes[:, k] = following[np.arange(rows), k - 1, codes[:, k - 1]]
    return codes


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """uint8 [rows, cols], 0 to 3 -> uint8 [rows, ceil(cols / 4)], code of column k at bits 2 * (k % 4)."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))).reshape(len(codes), -1, 4)
    return (padded << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
