"""The row in plain numpy, straight from docs/row-format.md: same signatures as `rows`, no native code but the checksum's own table. The oracle of the tests."""

from typing import Any

import numpy as np

from moet.layout.geometry import BLOCK_COLS, BLOCK_ROWS, TILE, RowGeometry
from moet.layout.planes import PROJECTIONS, make_matrix, plane_layout, shapes
from moet.numerics import E2M1, E4M3, UE5M3, UE8M0, decode_tcq2

SYM2 = np.array([-4.0, -1.0, 1.0, 4.0])


def crc32c(data: bytes | np.ndarray, seed: int = 0) -> int:
    """CRC-32C, byte by byte. Slow: about 1 MB/s."""
    crc = seed ^ 0xFFFFFFFF
    for byte in bytes(data):
        crc = _CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _crc_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC_TABLE = [_crc_entry(i) for i in range(256)]


def pack_row(geometry: RowGeometry, gate: Any, up: Any, down: Any, out: np.ndarray) -> None:
    """Writes the row of (gate, up, down) into out, uint8 [row_bytes]."""
    g = geometry
    out[:] = 0
    w13, w2, crcs = *_tiles(g, out), _crc_words(g, out)
    planes = {name: _blocks(g, matrix) for name, matrix in zip(PROJECTIONS, (gate, up, down))}
    for t in range(g.tiles):
        rows = slice(t * TILE, t * TILE + TILE)
        blocks = w13[t, : g.hidden_padded // BLOCK_COLS * g.block_bytes].reshape(-1, g.block_bytes)
        codes = np.concatenate([planes[name][0][rows] for name in ("gate", "up")])  # [64, blocks, words]
        blocks[:, : g.block_code_bytes] = _bytes(codes.transpose(1, 2, 0))
        blocks[:, g.block_code_bytes :] = _scale_bytes(g, [planes[name][1][rows] for name in ("gate", "up")])
        if g.biased:
            bias = np.zeros(BLOCK_ROWS, np.float32)
            for half, matrix in enumerate((gate, up)):
                part = matrix.bias[rows]
                bias[half * TILE : half * TILE + len(part)] = part
            w13[t, -4 * BLOCK_ROWS :] = bias.view(np.uint8)
        codes, scales = planes["down"]
        blocks = w2[t].reshape(-1, g.block_bytes)
        for b, block in enumerate(blocks):
            at = slice(b * BLOCK_ROWS, (b + 1) * BLOCK_ROWS)
            block[: g.block_code_bytes] = _bytes(codes[at, t : t + 1].transpose(1, 2, 0))[0]
            halves = [scales[at, t : t + 1][:TILE], scales[at, t : t + 1][TILE:]]
            block[g.block_code_bytes :] = _scale_bytes(g, halves)[0]
        crcs[t], crcs[g.tiles + t] = crc32c(w13[t]), crc32c(w2[t])
    multipliers = np.array([gate.multiplier, up.multiplier, down.multiplier, 0], np.float32)
    out[g.extras_offset : g.extras_offset + 16] = multipliers.view(np.uint8)
    if g.biased:
        out[g.bias_offset : g.bias_offset + 4 * g.hidden] = down.bias.view(np.uint8)
    out[-4:] = np.array([crc32c(out[g.extras_offset : -4])], "<u4").view(np.uint8)


def unpack_row(geometry: RowGeometry, row: np.ndarray) -> tuple[Any, Any, Any]:
    """The matrices that went into the row, bit for bit: `moet.checkpoint.Matrix`, or `Sym2Matrix`, `Tcq2Matrix`."""
    g = geometry
    w13, w2 = _tiles(g, row)
    k_blocks, n_blocks = g.hidden_padded // BLOCK_COLS, g.hidden_padded // BLOCK_ROWS
    w13_blocks = w13[:, : k_blocks * g.block_bytes].reshape(g.tiles, k_blocks, g.block_bytes)
    w2_blocks = w2.reshape(g.tiles, n_blocks, g.block_bytes)
    multipliers = row[g.extras_offset : g.extras_offset + 12].view(np.float32)
    matrices = []
    for index, name in enumerate(PROJECTIONS):
        rows, cols = shapes(g, name)
        code_shape, scale_shape, _ = plane_layout(g.format, rows, cols, g.bits)
        source = w2_blocks.transpose(1, 0, 2) if name == "down" else w13_blocks  # [64-row strips, K blocks, bytes]
        words = np.ascontiguousarray(source[..., : g.block_code_bytes]).view("<u4").reshape(*source.shape[:2], g.bits, BLOCK_ROWS)
        half = slice(None) if name == "down" else slice(index * TILE, index * TILE + TILE)
        codes = words[..., half].transpose(0, 3, 1, 2)  # [strip, row, K block, word]
        codes = np.ascontiguousarray(codes).reshape(codes.shape[0] * codes.shape[1], -1).view(np.uint8)
        scales = None
        if scale_shape:
            scales = _read_scales(g, np.ascontiguousarray(source[..., g.block_code_bytes :]), half)
            scales = np.ascontiguousarray(scales[tuple(slice(0, n) for n in scale_shape)])
        bias = None
        if g.biased and name == "down":
            bias = row[g.bias_offset : g.bias_offset + 4 * rows].view(np.float32).copy()
        elif g.biased:
            bias = np.ascontiguousarray(w13[:, -4 * BLOCK_ROWS :]).view(np.float32)[:, half].reshape(-1)[:rows].copy()
        codes = np.ascontiguousarray(codes[: code_shape[0], : code_shape[1]])
        matrices.append(make_matrix(g, name, codes, scales, float(multipliers[index]), bias))
    return tuple(matrices)


def dequantize(matrix: Any) -> np.ndarray:
    """Values of a matrix, float64 [rows, cols]; exact."""
    if matrix.format == "tcq2":
        scales = np.repeat(UE5M3[matrix.scales], 32, axis=1)[:, : matrix.cols]
        return decode_tcq2(matrix.codes, matrix.cols) * scales * np.float64(np.float32(matrix.multiplier))
    bits = {"sym2": 2, "mxfp4": 4, "nvfp4": 4, "fp8": 8, "fp8_row": 8, "bf16": 16}[matrix.format]
    if matrix.format == "bf16":
        return (matrix.codes.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (matrix.codes[..., None] >> shifts & (1 << bits) - 1).reshape(matrix.rows, -1)[:, : matrix.cols]
    values = {2: SYM2, 4: E2M1, 8: E4M3}[bits][codes]
    if matrix.format in ("sym2", "mxfp4"):
        scales = np.repeat(UE8M0[matrix.scales], 32, axis=1)[:, : matrix.cols]
    elif matrix.format == "nvfp4":
        scales = np.repeat(E4M3[matrix.scales], 16, axis=1) * np.float64(np.float32(matrix.multiplier))
    elif matrix.format == "fp8":
        scales = np.repeat(np.repeat(matrix.scales.astype(np.float64), 32, axis=0), 32, axis=1)[: matrix.rows, : matrix.cols]
    else:
        scales = matrix.scales.astype(np.float64)[:, None]
    return values * scales


def dequantize_row(geometry: RowGeometry, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of gate, up [inter, hidden] and down [hidden, inter], float64; exact."""
    return tuple(dequantize(matrix) for matrix in unpack_row(geometry, row))


def check_row(geometry: RowGeometry, row: np.ndarray) -> list[str]:
    """Names of the parts whose checksum does not hold: "w13 tile 3", "w2 tile 0", "extras". Empty: the row is intact."""
    g, crcs = geometry, _crc_words(geometry, row)
    w13, w2 = _tiles(g, row)
    bad = [f"w13 tile {t}" for t in range(g.tiles) if crc32c(w13[t]) != crcs[t]]
    bad += [f"w2 tile {t}" for t in range(g.tiles) if crc32c(w2[t]) != crcs[g.tiles + t]]
    if crc32c(row[g.extras_offset : -4]) != row[-4:].view("<u4")[0]:
        bad.append("extras")
    return bad


def _tiles(g: RowGeometry, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return row[: g.w2_offset].reshape(g.tiles, -1), row[g.w2_offset : g.extras_offset].reshape(g.tiles, -1)


def _crc_words(g: RowGeometry, row: np.ndarray) -> np.ndarray:
    return row[g.crc_offset : g.crc_offset + 8 * g.tiles].view("<u4")


def _bytes(words: np.ndarray) -> np.ndarray:
    """uint32 [blocks, ...] -> uint8 [blocks, bytes]."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)


def _padded(array: np.ndarray, rows: int, cols: int) -> np.ndarray:
    out = np.zeros((rows, cols), array.dtype)
    out[: array.shape[0], : array.shape[1]] = array
    return out


def _blocks(g: RowGeometry, matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint32 [padded rows, K blocks, words a block] and scales [padded rows, K blocks, scales a row and block], zeros in the padding."""
    rows = -(-matrix.rows // BLOCK_ROWS) * BLOCK_ROWS
    blocks = -(-matrix.cols // BLOCK_ROWS) * 2
    codes = _padded(matrix.codes, rows, blocks * 4 * g.bits).view("<u4").reshape(rows, blocks, g.bits)
    if g.format == "bf16":
        scales = np.zeros((rows, blocks, 0), np.uint8)
    elif g.format == "fp8":
        scales = _padded(matrix.scales, rows // 32, blocks)
        scales = np.repeat(scales, 32, axis=0)[..., None]
    elif g.format == "fp8_row":
        groups = -(-matrix.cols // BLOCK_COLS)
        scales = _padded(np.repeat(matrix.scales[:, None], groups, axis=1), rows, blocks)[..., None]
    else:
        per_block = 2 if g.format == "nvfp4" else 1
        scales = _padded(matrix.scales, rows, blocks * per_block).reshape(rows, blocks, per_block)
    return codes, scales


def _scale_bytes(g: RowGeometry, halves: list[np.ndarray]) -> np.ndarray:
    """Scales of rows 0-31 and 32-63 of some blocks, each [32, blocks, scales] -> uint8 [blocks, block_scale_bytes]."""
    if g.format == "fp8":
        out = np.zeros((halves[0].shape[1], 4), np.float32)
        out[:, 0], out[:, 1] = halves[0][0, :, 0], halves[1][0, :, 0]
        return out.view(np.uint8)
    return _bytes(np.concatenate(halves).transpose(1, 2, 0))


def _read_scales(g: RowGeometry, scales: np.ndarray, half: slice) -> np.ndarray:
    """uint8 [strips, K blocks, block_scale_bytes] -> the matrix' scales, still padded."""
    strips = len(scales)
    if g.format == "fp8":
        values = scales.view(np.float32)[..., :2]
        if half == slice(None):
            return values.transpose(0, 2, 1).reshape(strips * 2, -1)
        return values[..., half.start // 32]
    if g.format == "fp8_row":
        return scales.view(np.float32)[:, 0, half].reshape(-1)
    values = scales.reshape(strips, scales.shape[1], -1, BLOCK_ROWS)[..., half].transpose(0, 3, 1, 2)
    return values.reshape(strips * values.shape[1], -1)
