"""The pager at work in small, for compute-sanitizer: decode in waves, a scan through the ring, rows from disk, a captured graph, a failed read. Every value is compared with a
resident runtime's. The checkers make kernels up to a hundred times slower, so waits may take long."""

import errno
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "cpu"), str(ROOT)]

import torch
from expert_layers import Layers, batch, open_runtime

from moet.layout import RowGeometry
from moet.store.pinned import cuda_register

EXPERTS, TOP_K, LIMIT_S = 16, 4, 60.0


def main() -> None:
    geometry = RowGeometry("tcq2", 128, 96, False)
    layers = Layers({0: geometry, 1: geometry}, EXPERTS)
    with tempfile.TemporaryDirectory() as folder, layers.store(register=cuda_register) as whole, layers.store(
        Path(folder), register=cuda_register, ram_bytes=10 * geometry.row_bytes, io_threads=2
    ) as store:
        resident, paged = (
            open_runtime(s, layers, TOP_K, False, max_tokens=40, decode_tokens=4, ring_rows=2, fetch_blocks=2, limit_s=LIMIT_S) for s in (whole, store)
        )
        resident.allocate(0)
        paged.allocate(paged.gpu_bytes_minimum() + 4 * geometry.row_bytes)
        for runtime in (resident, paged):
            runtime.arm(True)
        wrong = calls = 0
        for step in range(4):
            for layer, tokens, scan in ((0, 3, False), (1, 4, False), (0, 40, True), (1, 20, True)):
                call = batch(tokens, geometry.hidden, EXPERTS, TOP_K, step, "cuda")
                wrong += not torch.equal(resident.forward(layer, *call, None, scan), paged.forward(layer, *call, None, scan))
                calls += 1
        x, weights, ids = batch(4, geometry.hidden, EXPERTS, TOP_K, 0, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [paged.forward(layer, x, weights, ids) for layer in (0, 1)]
        for step in range(3):
            ids.copy_(batch(4, geometry.hidden, EXPERTS, TOP_K, 10 + step, "cuda")[2])
            graph.replay()
            for layer, out in enumerate(captured):
                wrong += not torch.equal(out, resident.forward(layer, x, weights, ids))
                calls += 1
        for expert in range(EXPERTS):
            store.inject(0, expert, 0, errno.EIO, 1)
        finite = torch.isfinite(paged.forward(0, x, weights, ids).float()).all().item()
        counters = paged.counters()
        paged.close()
        resident.close()
    print(f"{calls} calls, {wrong} wrong, finite after failed reads: {finite}, {counters}")
    sys.exit(bool(wrong) or not finite)


if __name__ == "__main__":
    main()
