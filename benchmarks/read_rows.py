"""How fast rows come off this disk: O_DIRECT and buffered, by threads and chunk size, with and without
checksums, against `dd iflag=direct`.

A file of rows is written, its page cache dropped, and all rows are paged through an arena of a quarter of
them: the first pass faults the arena's pages in, then five are measured. Usage: python
benchmarks/read_rows.py FOLDER [--json OUT] [--gib 0.5]
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

from moet.layout import RowGeometry, crc32c
from moet.store import Pager, RowSource

ROUNDS = 5
SHAPES = {
    "6.8 MiB (hidden 4096, inter 2048)": RowGeometry("sym2", 4096, 2048, False),
    "0.4 MiB (hidden 1024, inter 512)": RowGeometry("sym2", 1024, 512, False),
}


def sealed_row(g: RowGeometry, seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).integers(0, 256, g.row_bytes, np.uint8)
    row[g.crc_offset :] = 0
    starts = [(t * g.w13_tile_bytes, g.w13_tile_bytes) for t in range(g.tiles)]
    starts += [(g.w2_offset + t * g.w2_tile_bytes, g.w2_tile_bytes) for t in range(g.tiles)]
    row[g.crc_offset : g.crc_offset + 8 * g.tiles] = np.array(
        [crc32c(row[o : o + n]) for o, n in starts], "<u4"
    ).view(np.uint8)
    row[-4:] = np.array([crc32c(row[g.extras_offset : -4])], "<u4").view(np.uint8)
    return row


def drop_cache(path: Path) -> None:
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def page_all(pager: Pager, experts: int, batch: int) -> float:
    start = time.perf_counter()
    for first in range(0, experts, batch):
        for _ in pager.rows(0, list(range(first, min(first + batch, experts))), scan=True):
            pass
    return time.perf_counter() - start


def measure(source: RowSource, batch: int, **options) -> dict[str, Any]:
    """Median, least and most GB/s of ROUNDS passes over all rows, `batch` of them at a time."""
    g = source.geometry
    rates = []
    with Pager(
        {0: source},
        budget_bytes=source.experts // 4 * g.row_bytes,
        staging_slots=source.experts // 8,
        **options,
    ) as pager:
        page_all(pager, source.experts, batch)
        for _ in range(ROUNDS):
            drop_cache(source.path)
            before = pager.counters()
            seconds = page_all(pager, source.experts, batch)
            after = pager.counters()
            read = after.bytes_read - before.bytes_read
            assert read >= 0.7 * source.experts * g.row_bytes, "most rows must come from the disk"
            rates.append(read / seconds / 1e9)
    gb = [round(f(rates), 3) for f in (statistics.median, min, max)]
    return {
        **options,
        "batch": batch,
        "gb_per_s": gb[0],
        "least": gb[1],
        "most": gb[2],
        "row_us_p50": after.latency_us(0.5),
    }


def dd(path: Path) -> float:
    """GB/s of one sequential stream of 8 MiB O_DIRECT reads, median of ROUNDS."""
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run(
            ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"], check=True, capture_output=True
        )
        rates.append(path.stat().st_size / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


def rate(runs: list[dict[str, Any]], direct: bool) -> float:
    """GB/s of the run with 8 threads and everything else at its default."""
    return next(r for r in runs if r.get("direct_io") is direct and r["io_threads"] == 8)["gb_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=0.5, help="size of each row file")
    parser.add_argument("--json", type=Path, help="write the result there (docs/results/read_rows.json)")
    args = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {}
    claims = []
    for name, g in SHAPES.items():
        experts = int(args.gib * (1 << 30)) // g.row_bytes
        path = args.folder / "read_rows.bin"
        with path.open("wb") as f:
            row = sealed_row(g, 1)
            for _ in range(experts):
                f.write(row)
        source = RowSource(g, experts, path)
        drop_cache(path)
        runs = samples[name] = [{"dd": round(dd(path), 3)}]
        for direct in (True, False):
            for threads in (1, 4, 8):
                runs.append(measure(source, 24, direct_io=direct, io_threads=threads))
        for chunk in (256 << 10, 4 << 20, 1 << 30):
            runs.append(measure(source, 24, direct_io=True, io_threads=8, chunk_bytes=chunk))
        runs.append(measure(source, 24, direct_io=True, io_threads=8, verify=False))
        runs.append(measure(source, 1, direct_io=True, io_threads=8))
        for run in runs:
            print(name, json.dumps(run), flush=True)
        direct, buffered = (rate(runs, direct_io) for direct_io in (True, False))
        for id, what, value, unit, target in (
            ("read-direct", "O_DIRECT, 8 threads, checksums", direct, "GB/s", None),
            ("read-buffered", "buffered, 8 threads, checksums", buffered, "GB/s", None),
            (
                "read-dd",
                "O_DIRECT against dd in the same run",
                round(direct / runs[0]["dd"], 3),
                "ratio",
                1.0,
            ),
        ):
            claims.append(record.Claim(f"{id}-{g.hidden}", f"rows of {name}: {what}", value, unit, target))
        path.unlink()
    if args.json:
        record.write(args.json, claims, samples, "base")


if __name__ == "__main__":
    main()
