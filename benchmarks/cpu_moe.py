"""Claim M6: speed of the 2-bit expert layer on a CPU at decode, against the memory's read bandwidth and against llama.cpp, in one run.

Rows are resident and rotate over more than 1 GB, so that none is in a cache. Rounds interleave everything that is compared, so that what else
the machine does falls on all alike. Memory: 1.2 GB of rows a row format, 1.2 GB of llama.cpp's tensors with --ggml, 0.5 GB for the read bandwidth.

    python benchmarks/cpu_moe.py --ggml VENV/lib/python3.11/site-packages/llama_cpp/lib
"""

import argparse
import ctypes
import itertools
import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import record
import torch
from ggml_moe import GgmlExperts

from moet import native
from moet.kernels import ACTIVATIONS, Threads, isa
from moet.kernels.expert_mlp import lib
from moet.layout import RowGeometry, crc32c
from moet.models import Activation
from moet.moe import ExpertRuntime
from moet.store import RowSource

SHAPES = {"v4-flash": (4096, 2048, 6), "glm-5.2": (6144, 2048, 8)}   # hidden, inter, experts a token
SCALES = {"sym2": 114, "tcq2": 34}   # a byte of about 2^-12
COLD_BYTES, STREAM_BYTES = 1_100_000_000, 1 << 29
FIRST = "int24"   # what the claims are about


def random_row(geometry: RowGeometry, seed: int = 0) -> np.ndarray:
    """Random codes, scales of about 2^-11, right checksums."""
    g, rng = geometry, np.random.default_rng(seed)
    row = rng.integers(0, 256, g.row_bytes, np.uint8)
    row[: g.extras_offset].reshape(-1, g.block_bytes)[:, g.block_code_bytes :] = SCALES[g.format] + rng.integers(0, 5, g.block_scale_bytes)
    row[g.extras_offset :] = 0
    row[g.extras_offset : g.extras_offset + 12] = np.ones(3, np.float32).view(np.uint8)
    checksums = row[g.crc_offset : g.crc_offset + 8 * g.tiles].view(np.uint32)
    for t in range(g.tiles):
        checksums[t] = crc32c(row[t * g.w13_tile_bytes : (t + 1) * g.w13_tile_bytes])
        checksums[g.tiles + t] = crc32c(row[g.w2_offset + t * g.w2_tile_bytes : g.w2_offset + (t + 1) * g.w2_tile_bytes])
    row[-4:] = np.array([crc32c(row[g.extras_offset : -4])], np.uint32).view(np.uint8)
    return row


def open_runtime(geometry: RowGeometry, row: np.ndarray, experts: int, threads: int, activations: str) -> ExpertRuntime:
    """One layer of `experts` copies of a row; a pack that has no file."""
    source = RowSource(geometry, experts)
    pack = SimpleNamespace(activation=Activation(), fingerprint="", layers={0: SimpleNamespace(rows=lambda precision: source)})
    runtime = ExpertRuntime(pack, precision="base", budget_bytes=0, threads=threads, io_threads=1, activations=activations)
    for expert in range(experts):
        runtime.pager.put(0, expert, row)
    return runtime


class Stream:
    """The plainest read of 512 MiB with the kernels' own threads."""

    def __init__(self, threads: int) -> None:
        self._threads = Threads(threads)
        raw = np.ones(STREAM_BYTES + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self._data, self._folded = raw[start : start + STREAM_BYTES], ctypes.c_uint64()
        lib().moet_stream_read.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] + [ctypes.c_void_p] * 2 + [ctypes.c_size_t]

    def __call__(self) -> None:
        native.call(lib().moet_stream_read, self._threads.handle, self._data.ctypes.data, STREAM_BYTES, ctypes.addressof(self._folded))


def timed(samples: list[float], work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    samples.append(time.perf_counter() - start)


def measure(shape: str, threads: int, formats: list[str], ggml: Path | None, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round: "stream", "FORMAT ACTIVATIONS xTOKENS", "llama.cpp TYPE xTOKENS"."""
    hidden, inter, top_k = SHAPES[shape]
    geometries = [RowGeometry(format, hidden, inter, False) for format in formats]
    experts = -(-COLD_BYTES // geometries[0].row_bytes)
    runtimes = {g.format: open_runtime(g, random_row(g), experts, threads, FIRST) for g in geometries}
    llamas = {kind: GgmlExperts(ggml, kind, hidden, inter, experts, threads) for kind in ("Q2_K",)} if ggml else {}
    stream, samples, rng = Stream(threads), defaultdict(list), np.random.default_rng(1)
    order, used = rng.permutation(experts).astype(np.int32), 0
    for r in range(rounds + 1):   # the first round warms up
        timed(samples["stream"], stream)
        for tokens in (1, 4):
            x = torch.from_numpy(rng.standard_normal((tokens, hidden)).astype(np.float32)).bfloat16()
            for name, (format, runtime) in itertools.product(ACTIVATIONS, runtimes.items()):
                runtime.activations = name
                ids = np.take(order, range(used, used + tokens * top_k), mode="wrap").reshape(tokens, top_k)
                used += tokens * top_k
                routed, weights = torch.from_numpy(ids), torch.ones(tokens, top_k)
                timed(samples[f"{format} {name} x{tokens}"], lambda: runtime.forward(0, x, weights, routed))
            for kind, llama in llamas.items():
                ids = np.take(order, range(used, used + tokens * top_k), mode="wrap").reshape(tokens, top_k)
                used += tokens * top_k
                hidden_states = x.float().numpy()
                timed(samples[f"llama.cpp {kind} x{tokens}"], lambda: llama.run(hidden_states, ids))
    for runtime in runtimes.values():
        runtime.close()
    for llama in llamas.values():
        llama.close()
    return {name: values[1:] for name, values in samples.items()}


def read_bytes(shape: str, name: str, tokens: int) -> int:
    """Bytes of weights that a step reads; every token has experts of its own."""
    hidden, inter, top_k = SHAPES[shape]
    blocks = 3 * hidden * inter * top_k * tokens
    return blocks // 256 * 84 if "Q2_K" in name else RowGeometry("sym2", hidden, inter, False).extras_offset * top_k * tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, help="folder with libggml-base.so and libggml-cpu.so; without it, no comparison")
    parser.add_argument("--llama-version", default="", help="version of llama-cpp-python that the libraries came from")
    parser.add_argument("--label", default="", help="names the machine in the claims, as in 'avx512, 16-core Xeon: '")
    parser.add_argument("--formats", nargs="+", choices=tuple(SCALES), default=["tcq2"], help="of the rows; later ones are also compared with the first")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=record.ROOT / "docs" / "results" / "cpu_moe.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]   # of the minute before
    samples, table, claims = {}, {}, []
    for shape in options.shapes:
        for threads in options.threads:
            found = measure(shape, threads, options.formats, options.ggml, options.rounds)
            samples[f"{shape}, {threads} threads"] = {name: [round(v, 6) for v in values] for name, values in found.items()}
            bandwidth = STREAM_BYTES / statistics.median(found["stream"])
            rows = {"read bandwidth GB/s": round(bandwidth / 1e9, 2)}
            for name, values in found.items():
                if name == "stream":
                    continue
                tokens, median = int(re.search(r"x(\d+)$", name)[1]), statistics.median(values)
                rate = read_bytes(shape, name, tokens) / median
                hidden, inter, top_k = SHAPES[shape]
                rows[name] = {
                    "ms": round(median * 1e3, 3), "GB/s": round(rate / 1e9, 2), "of bandwidth": round(rate / bandwidth, 3),
                    "weights/ns": round(3 * hidden * inter * top_k * tokens / median / 1e9, 2),
                }  # fmt: skip
                print(f"{shape:9} threads {threads}  {name:22} {rows[name]}", flush=True)
            table[f"{shape}, {threads} threads"] = rows
            suffix = f"{options.label}{shape}, 1 token, {threads} thread{'s' * (threads > 1)}"
            for format in options.formats:
                what, ours = f"CPU {format} expert layer, {suffix}", rows[f"{format} {FIRST} x1"]
                claims.append(record.Claim("M6", f"{what}, {FIRST}: share of read bandwidth", ours["of bandwidth"], "", 0.5))
                if options.ggml and threads == 1:   # ggml's threads spin for each other: with more of them the ratio would measure what else runs here
                    for name in (FIRST, "int8"):
                        ratio = round(rows["llama.cpp Q2_K x1"]["ms"] / rows[f"{format} {name} x1"]["ms"], 3)
                        claims.append(record.Claim("M6", f"{what}, {name}: speed relative to llama.cpp Q2_K", ratio, "x", 1.0))
            for format in options.formats[1:]:
                ratio = round(min(found[f"{options.formats[0]} {FIRST} x1"]) / min(found[f"{format} {FIRST} x1"]), 3)
                claims.append(record.Claim("M6", f"CPU {format} expert layer, {suffix}, {FIRST}: speed relative to {options.formats[0]}, best rounds", ratio, "x", 0.9))
    more = {"isa": isa(), "llama_cpp_python": options.llama_version or None, "load_average": load}
    result = record.write(options.out, claims, samples, f"base, {FIRST}", medians=table, **more)
    for claim in result["claims"]:
        print(claim["what"], claim["value"], claim["unit"], "holds" if claim["held"] else "DOES NOT HOLD")


if __name__ == "__main__":
    main()
