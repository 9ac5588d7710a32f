"""The trellis of `tcq2` rows (docs/row-format.md): a two-bit code and the code after it choose one of 16 levels.

Trellis-coded quantization is Marcellin and Fischer's (IEEE Trans. Communications 38(1), 1990); that the decoder reads
overlapping windows of the stored bits is QTIP's "bitshift trellis" (Tseng et al., arXiv:2406.11235). The levels are ours:
docs/decisions/003-tcq2.md."""

import numpy as np

TCQ2_LEVELS = np.array([3, 11, -3, -9, -5, -15, 7, 1, -1, -7, 15, 5, 9, 3, -11, -3], np.float64)
"""Level of each window, code + 4 * next code. level[15 - i] == -level[i]: complementing all codes negates all levels.
Odd and at most 15 in magnitude, so exact in E4M3, int8 and BF16."""

WORD_CODES = 16
"""Codes that form a chain: those of a 32-bit word. The last one's next code is its own high bit, twice."""


def tcq2_windows(codes: np.ndarray, cols: int) -> np.ndarray:
    """uint8 [rows, ceil(cols / 4)], code of column k at bits 2 * (k % 4) -> windows 0..15, uint8 [rows, cols].

    Where the last word is not whole, the missing bytes are zero."""
    rows, words = codes.shape[0], -(-cols // WORD_CODES)
    padded = np.zeros((rows, 4 * words), np.uint8)
    padded[:, : codes.shape[1]] = codes
    signed = padded.view("<i4")[..., None]
    return (signed >> np.arange(0, 32, 2) & 15).astype(np.uint8).reshape(rows, -1)[:, :cols]


def decode_tcq2(codes: np.ndarray, cols: int) -> np.ndarray:
    """uint8 [rows, ceil(cols / 4)] as of `tcq2_windows` -> levels, float64 [rows, cols]."""
    return TCQ2_LEVELS[tcq2_windows(codes, cols)]
