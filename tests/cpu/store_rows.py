"""Row files for the tests of store and cache: random bytes with the checksums of docs/row-format.md, computed
here and not by moet."""

import os
import struct
from pathlib import Path

import numpy as np

from moet.layout import RowGeometry
from moet.store import Pager, RowSource

_TABLE = []
for _i in range(256):
    for _ in range(8):
        _i = (_i >> 1) ^ (0x82F63B78 if _i & 1 else 0)
    _TABLE.append(_i)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogue of CRCs


def seal(geometry: RowGeometry, row: np.ndarray) -> None:
    """Writes all checksums of a row."""
    g = geometry
    crcs = [crc32c(row[t * g.w13_tile_bytes : (t + 1) * g.w13_tile_bytes].tobytes()) for t in range(g.tiles)]
    crcs += [
        crc32c(row[g.w2_offset + t * g.w2_tile_bytes : g.w2_offset + (t + 1) * g.w2_tile_bytes].tobytes())
        for t in range(g.tiles)
    ]
    row[g.crc_offset : g.crc_offset + 4 * len(crcs)] = np.frombuffer(
        struct.pack(f"<{len(crcs)}I", *crcs), np.uint8
    )
    row[-4:] = np.frombuffer(struct.pack("<I", crc32c(row[g.extras_offset : -4].tobytes())), np.uint8)


def random_rows(geometry: RowGeometry, experts: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, 256, (experts, geometry.row_bytes), np.uint8)
    rows[:, geometry.crc_offset :] = 0
    for row in rows:
        seal(geometry, row)
    return rows


class Rows:
    """Layers of random rows in files of a folder: `rows[layer]` is what the file holds, `sources` what a
    Pager takes."""

    def __init__(self, folder: Path, geometries: dict[int, RowGeometry], experts: int) -> None:
        self.rows: dict[int, np.ndarray] = {}
        self.sources: dict[int, RowSource] = {}
        for layer, geometry in geometries.items():
            self.rows[layer] = random_rows(geometry, experts, seed=layer)
            path = folder / f"rows-{layer:03d}"
            with path.open("wb") as f:
                f.write(bytes(8192) + self.rows[layer].tobytes())
                f.flush()
                os.fsync(f.fileno())
            self.sources[layer] = RowSource(geometry, experts, path, 8192)

    @property
    def total(self) -> int:
        return sum(r.nbytes for r in self.rows.values())

    def parts(self, layer: int, expert: int, rank: int = 0, world: int = 1) -> tuple[bytes, ...]:
        segments = self.sources[layer].geometry.slice(rank, world).segments
        return tuple(self.rows[layer][expert, o : o + n].tobytes() for o, n in segments)

    def check(self, pager: Pager, layer: int, experts: list[int], scan: bool = False) -> list[int]:
        """Pages a layer in and compares every byte; returns the order in which the rows came."""
        order = []
        for expert, *parts in pager.rows(layer, experts, scan):
            assert tuple(p.tobytes() for p in parts) == self.parts(layer, expert, pager.rank, pager.world), (
                layer,
                expert,
            )
            order.append(expert)
        assert sorted(order) == list(experts)
        return order


ERRNO, SHORT, DELAY, CORRUPT = range(4)


def inject(pager: Pager, layer: int, expert: int, kind: int, value: int = 0, times: int = 1) -> None:
    """The next `times` preads of a row: fail with errno `value`, read at most `value` bytes, start `value` us
    late, flip a bit of byte `value`."""
    pager._call("inject", pager.position(layer), expert, kind, value, times)
