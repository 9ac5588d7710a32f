"""The pager at work in small, for compute-sanitizer: decode in waves, scans through the ring, rows from disk, a captured graph, failed reads. Every result is compared with a
resident runtime's. The checkers make kernels up to a hundred times slower, so waits may take long. `--emulated`: the kernels' source on the CPU instead."""

import argparse
import errno
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "cpu"), str(ROOT)]

import torch
from expert_layers import Layers, batch, counters, open_runtime, registration

from moet.layout import RowGeometry

EXPERTS, TOP_K, LIMIT_S = 16, 4, 60.0
EIO = 0   # kind of HostStore.inject


def captured(work: Callable[[], list[torch.Tensor]], emulated: bool) -> Callable[[], list[torch.Tensor]]:
    """`work` as a CUDA graph; each call replays it."""
    if emulated:
        return work
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return lambda: (graph.replay(), out)[1]


def run(folder: Path, emulated: bool) -> dict[str, object]:
    """{calls, wrong, finite, counters}: results compared, those that differ, whether all were finite while reads failed."""
    geometry, device = RowGeometry("tcq2", 128, 96, False), "cpu" if emulated else "cuda"
    layers, wrong, calls = Layers({0: geometry, 1: geometry}, EXPERTS), 0, 0
    with ExitStack() as stack:
        register = registration(emulated)
        stores = layers.store(register=register), layers.store(folder, register=register, ram_bytes=10 * geometry.row_bytes, io_threads=2)
        for store in stores:
            stack.enter_context(store)
        options = {"max_tokens": 40, "decode_tokens": 4, "ring_rows": 2, "fetch_blocks": 2, "limit_s": LIMIT_S}
        resident, paged = (open_runtime(store, layers, TOP_K, emulated, **options) for store in stores)
        resident.allocate(0)
        paged.allocate(paged.gpu_bytes_minimum() + 4 * geometry.row_bytes)
        for runtime in (resident, paged):
            stack.callback(runtime.close)
            runtime.arm(True)
        for step in range(4):
            for layer, tokens, scan in ((0, 3, False), (1, 4, False), (0, 40, True), (1, 20, True)):
                call = batch(tokens, geometry.hidden, EXPERTS, TOP_K, step, device)
                wrong += not torch.equal(resident.forward(layer, *call, None, scan), paged.forward(layer, *call, None, scan))
                calls += 1
        x, weights, ids = batch(4, geometry.hidden, EXPERTS, TOP_K, 0, device)
        step = captured(lambda: [paged.forward(layer, x, weights, ids) for layer in (0, 1)], emulated)
        for seed in range(3):
            ids.copy_(batch(4, geometry.hidden, EXPERTS, TOP_K, 10 + seed, device)[2])
            wrong += sum(not torch.equal(out, resident.forward(layer, x, weights, ids)) for layer, out in enumerate(step()))
            calls += 2
        for expert in range(EXPERTS):
            stores[1].inject(0, expert, EIO, errno.EIO, 1)
        finite = all(torch.isfinite(paged.forward(0, *batch(4, geometry.hidden, EXPERTS, TOP_K, 20 + seed, device)).float()).all().item() for seed in range(3))
        return {"calls": calls, "wrong": wrong, "finite": finite, "counters": counters(paged)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), parser.parse_args().emulated)
    print(found)
    sys.exit(bool(found["wrong"]) or not found["finite"])


if __name__ == "__main__":
    main()
