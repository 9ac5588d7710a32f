"""Speed of encoding and packing rows: GB/s of source bytes on one core, layout and checksums included.

    python benchmarks/encode.py --out docs/results/encode.json
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import record

from moet.checkpoint.weights import ExpertWeights, Matrix
from moet.layout import RowGeometry, pack_row
from moet.layout.planes import PROJECTIONS, plane_layout, shapes
from moet.quantize import encode_row

TARGETS = {"mxfp4": 1.0, "nvfp4": 0.15, "fp8": 0.15, "fp8_row": 0.15, "bf16": 0.15}


def random_matrix(rng: np.random.Generator, geometry: RowGeometry, projection: str) -> Matrix:
    """Normal weights in the format: the mix of exponents, magnitudes and zeros that real experts have."""
    rows, cols = shapes(geometry, projection)
    weights = rng.standard_normal((rows, cols), np.float32)
    codes_shape, scale_shape, dtype = plane_layout(geometry.format, rows, cols, geometry.bits)
    scales = None
    if geometry.format == "bf16":
        codes = (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif geometry.bits == 8:
        codes = np.clip(np.abs(weights) * 16, 0, 126).astype(np.uint8) | (np.signbit(weights) << 7).astype(np.uint8)
        scales = np.full(scale_shape, 0.01, dtype)
    else:
        grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
        groups = np.abs(weights).reshape(rows, -1, 32).max(2, keepdims=True)
        power = np.exp2(np.ceil(np.log2(groups / 6)))  # the largest magnitude of a block falls into (3, 6]
        nibbles = np.searchsorted(grid, np.abs(weights.reshape(rows, -1, 32) / power)).astype(np.uint8).reshape(rows, cols)
        nibbles |= (np.signbit(weights) << 3).astype(np.uint8)
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        scales = rng.integers(0x30, 0x40, scale_shape, np.uint8) if geometry.format == "nvfp4" else (np.log2(power[..., 0]) + 120).astype(np.uint8)
    return Matrix(geometry.format, rows, cols, np.ascontiguousarray(codes), scales, 0.001 if geometry.format == "nvfp4" else 1.0)


def source_bytes(expert: ExpertWeights) -> int:
    return sum(a.nbytes for m in (expert.gate, expert.up, expert.down) for a in (m.codes, m.scales) if a is not None)


def measure(function, nbytes: int, repeats: int) -> list[float]:
    """GB/s of each repeat, by this thread's CPU time: the machine may be shared."""
    function()
    samples = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        samples.append(nbytes / (time.thread_time() - start) / 1e9)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/encode.json"))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inter", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    hidden, inter, repeats = arguments.hidden, arguments.inter, arguments.repeats
    rng = np.random.default_rng(0)
    samples, claims = {}, []
    base = RowGeometry("sym2", hidden, inter, False)
    base_row = np.zeros(base.row_bytes, np.uint8)
    for format, target in TARGETS.items():
        geometry = RowGeometry(format, hidden, inter, False)
        expert = ExpertWeights(0, 0, *[random_matrix(rng, geometry, name) for name in PROJECTIONS])
        row, nbytes = np.zeros(geometry.row_bytes, np.uint8), source_bytes(expert)
        runs = {
            "encode": lambda: encode_row(base, expert, base_row),
            "encode-portable": lambda: encode_row(base, expert, base_row, portable=True),
            "pack": lambda: pack_row(geometry, expert.gate, expert.up, expert.down, row),
        }
        for name, run in runs.items():
            samples[f"{name}-{format}"] = measure(run, nbytes, repeats if name != "encode-portable" else 3)
            print(f"{name:16} {format:8} {statistics.median(samples[f'{name}-{format}']):6.2f} GB/s")
        value = round(statistics.median(samples[f"encode-{format}"]), 3)
        what = f"{format} experts to 2-bit rows with checksums, source bytes, one core"
        claims.append(record.Claim(f"encode-{format}", what, value, "GB/s", target))
    shape = {"hidden": hidden, "inter": inter, "clock": "CPU time of the thread", "unit": "GB/s of source"}
    record.write(arguments.out, claims, samples, "base", shape=shape)


if __name__ == "__main__":
    main()
