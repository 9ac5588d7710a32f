"""Claims G4 and G6: 30 of DeepSeek-V4-Flash's expert layers (50.6 GiB) in files on a disk, 27 % of the rows in RAM, 15 % of them on the GPU. A step against the same step
with every row in RAM plus the bytes read at the disk's rate; and the start, from opening the store to the end of preheat, against reading as many bytes at that rate.

The all-RAM step runs over the same arena: each row's location is set to one of its slots, so that the same slots miss and as many bytes cross the link; only the values differ, and a
fixed trace does not look at them.

    python benchmarks/gpu/nvme.py --out FOLDER [--folder ON_THE_DISK]      about 3 minutes; writes up to 50.6 GiB there and removes them
"""

import ctypes
import json
import os
import shutil
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import arithmetic
import disk
import link
import numpy as np
import routing
import torch
from model import gpu_bytes, heat_of, runtime_over
from report import Report, arguments
from rows import TINY, V4_FLASH, Shape
from stack import Inputs, Stack, spread, timed_steps

from moet.store import HostStore, RowSource
from moet.store.pinned import cuda_register

LAYERS, RAM, GPU = 30, 0.27, 0.15
IO_THREADS = 8
DECODE_TOKENS = 64   # as a server for up to 64 streams has it
PARTS = (200, 120, 20)   # steps: warm-up, timed, together
COLD_STEPS = 6
HEAT_STEPS = 40
RESERVE = 2 << 30   # of the disk, left free


def layers_that_fit(shape: Shape, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    per_layer = shape.experts * shape.geometry.row_bytes + disk.HEADER
    return min(LAYERS, shape.layers, int((shutil.disk_usage(folder).free - RESERVE) // per_layer))


def open_store(sources: dict[int, RowSource], shape: Shape) -> HostStore:
    return HostStore(sources, ram_bytes=int(RAM * shape.bytes), io_threads=IO_THREADS, register=cuda_register)


def everything_in_ram(store: HostStore) -> None:
    """Points rows that are not in the arena at slots of others: their bytes are wrong, and as many."""
    (c,) = store.classes
    location = np.ctypeslib.as_array(ctypes.cast(c.location, ctypes.POINTER(ctypes.c_uint64)), (c.rows,))
    absent = np.flatnonzero((location & 0xFFFFFFFF) == 0)
    location[absent] = (np.uint64(1) << np.uint64(32)) | (absent % c.arena_slots + 1).astype(np.uint64)


def run(store: HostStore, shape: Shape, device: torch.device, runtime, inputs: Inputs, heat, report: Report, name: str, parts: tuple[int, int, int]) -> list[int]:
    """Steps from a GPU preloaded by `heat`; returns the bytes that the store read in each timed one, by its own counters."""
    stack = Stack(shape, runtime.forward, 1, device, None)
    runtime.arm(False)
    graph = stack.capture()
    runtime.resize(gpu_bytes(store, GPU))
    runtime.arm(True)
    runtime.preload(heat)
    read = []

    def note() -> None:
        read.append(store.counters().bytes_read)
        if len(read) % HEAT_STEPS == 0:   # as the engine does every few seconds: the server by itself hears of requests only
            store.set_heat(runtime.heat())

    found = timed_steps(stack, graph, runtime, inputs, parts, GPU, each=note)
    moved = np.diff(read[-1 - parts[1] :]).tolist()
    report.samples[name] = {
        "seconds": [round(s, 6) for s in found.samples.seconds], "missed_rows": list(found.samples.misses), "bytes": list(found.samples.bytes),
        "disk_bytes": moved, "counters": found.counters,
    }  # fmt: skip
    report.facts.setdefault("steps", {})[name] = arithmetic.rounded({
        **spread(found.samples.seconds), "mean_ms": 1e3 * statistics.mean(found.samples.seconds), "tok_per_s": 1 / statistics.mean(found.samples.seconds),
        "missed_rows": statistics.mean(found.samples.misses), "disk_mb": statistics.mean(moved) / 1e6, "tok_per_s_back_to_back": found.per_s,
        "misses_trend": arithmetic.trend(found.samples.misses), "disk_trend": arithmetic.trend(moved),
    })  # fmt: skip
    report.say(name, report.facts["steps"][name])
    report.write()
    return moved


def cold_start(sources, shape: Shape, device: torch.device, inputs: Inputs, report: Report) -> None:
    """Steps from an arena and slots that hold nothing."""
    with open_store(sources, shape) as store, runtime_over(store, shape, device, decode_tokens=DECODE_TOKENS, coverage=GPU) as runtime:
        stack = Stack(shape, runtime.forward, 1, device, None)
        graph = stack.capture()
        runtime.arm(True)
        found = timed_steps(stack, graph, runtime, inputs, (0, COLD_STEPS, 1), GPU)
    report.facts["cold_start"] = {"step_s": [round(s, 3) for s in found.samples.seconds], "missed_rows": list(found.samples.misses)}
    report.say("cold start:", report.facts["cold_start"])
    report.write()


def measure(shape: Shape, folder: Path, device: torch.device, report: Report, parts: tuple[int, int, int]) -> None:
    threads = len(os.sched_getaffinity(0))
    with report.timed("write"):
        sources, write_rate = disk.write(shape, folder, device, threads, report.say)
    try:
        before = disk.read_rate(sources, IO_THREADS, 3, 1)
        report.facts["disk"] = {"write_gb_per_s": round(write_rate / 1e9, 3), "read_gb_per_s": [round(before / 1e9, 3)], "io_threads": IO_THREADS}
        report.say("disk:", report.facts["disk"])
        inputs = Inputs.make(shape, sum(parts), 1, device)
        ids = inputs.ids.cpu().numpy()
        report.facts["locality"] = arithmetic.rounded(routing.locality(ids, shape.experts))
        heat = heat_of(ids[: parts[0]], shape.experts)
        with report.timed("start"):
            with report.timed("start: open and pin"):
                store = open_store(sources, shape)
            with ThreadPoolExecutor(1) as pool, report.timed(arithmetic.FILL):   # as the engine does
                filling = pool.submit(store.fill, heat)
                with report.timed("start: kernels and slots"):
                    context = runtime_over(store, shape, device, decode_tokens=DECODE_TOKENS, coverage=GPU)
                    runtime = context.__enter__()
                filled = filling.result()
            with report.timed("start: preload"):
                runtime.arm(True)
                runtime.preload(heat)
        report.facts |= {"warning": store.warning, "filled_rows": filled, "arena_slots": store.classes[0].arena_slots, "coverage": runtime.coverage()}
        try:
            report.facts["link"] = link.measure(store, device)
            run(store, shape, device, runtime, inputs, heat, report, "arena 27 %", parts)
            after = disk.read_rate(sources, IO_THREADS, 3, 2)
            report.facts["disk"]["read_gb_per_s"].append(round(after / 1e9, 3))
            everything_in_ram(store)
            none = run(store, shape, device, runtime, inputs, heat, report, "all in RAM", parts)
            if any(none):
                raise RuntimeError(f"all-RAM steps: expected no read, found {sum(none)} bytes")
            result = {**report.facts, "samples": report.samples, "times_s": report.times}
            report.claims = arithmetic.nvme_claims(result)
            report.facts["disk"]["fastest_gb_per_s"] = round(arithmetic.disk_bytes_per_s(result) / 1e9, 3)
            report.facts["failed_rows"] = runtime.counters().failed_rows
        finally:
            context.__exit__(None, None, None)
            store.close()
        if report.fits("cold start", 25):
            cold_start(sources, shape, device, inputs, report)
    finally:
        disk.remove(sources)


def main() -> None:
    parser = arguments(__doc__, 200)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/moet-nvme"), help="on the disk to measure")
    parser.add_argument("--again", type=Path, help="only compute the claims of this result file anew, from its samples")
    options = parser.parse_args()
    if options.again:
        result = json.loads(options.again.read_text())
        result["claims"] = [c.as_dict() for c in arithmetic.nvme_claims(result)]
        result["disk"]["fastest_gb_per_s"] = round(arithmetic.disk_bytes_per_s(result) / 1e9, 3)
        (options.out / "gpu_nvme.json").write_text(json.dumps(result, indent=1) + "\n")
        return
    shape = Shape(**{**vars(TINY if options.tiny else V4_FLASH), "format": options.format})
    shape = replace(shape, layers=layers_that_fit(shape, options.folder))
    report = Report(options.out / "gpu_nvme.json", f"base, bf16, {options.format} rows", options.seconds, options.commit)
    report.facts["model"] = {"layers": shape.layers, "of": LAYERS, "experts": shape.experts, "rows_gib": round(shape.bytes / 2**30, 2), "format": shape.format}
    report.say(report.facts["model"])
    measure(shape, options.folder, torch.device("cuda"), report, (6, 4, 2) if options.tiny else PARTS)
    report.finish()


if __name__ == "__main__":
    main()
