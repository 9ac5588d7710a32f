"""What the link from pinned memory to the GPU gives a plain cudaMemcpyAsync, from the same memory and in the same run as what is compared with it."""

import ctypes
import statistics

import numpy as np
import torch

from moet.store.pinned import CHUNK_BYTES

REPEATS, COPIES = 7, 200


def host_bytes(address: int, size: int) -> torch.Tensor:
    """uint8 [size], a view of host memory."""
    return torch.from_numpy(np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,)))


def arena(store) -> list[torch.Tensor]:
    """uint8 [arena_slots, slot_bytes] of each class."""
    return [host_bytes(c.arena, c.arena_slots * c.slot_bytes).view(c.arena_slots, c.slot_bytes) for c in store.classes]


def measure(store, device: torch.device) -> dict[str, object]:
    """Bytes a second of row-sized copies from random slots, and of copies of 64 rows: medians, and every sample in GB/s."""
    slots = arena(store)[0]
    count, size = slots.shape
    target, rng, out = torch.empty((64, size), dtype=torch.uint8, device=device), np.random.default_rng(0), {}
    for name, rows in (("row", 1), ("64 rows", min(64, count, max(CHUNK_BYTES // size, 1)))):
        copies, rates = max(COPIES // rows, 4), []
        per = min(max(CHUNK_BYTES // size, 1), count)   # rows of a registration; no copy may span two
        for _ in range(REPEATS):
            first = rng.integers(0, max(count // per, 1), copies) * per
            starts = (first + rng.integers(0, per - rows + 1, copies)).tolist()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for i, at in enumerate(starts):
                target[i % (64 // rows) * rows :][:rows].copy_(slots[at : at + rows], non_blocking=True)
            end.record()
            end.synchronize()
            rates.append(copies * rows * size / (begin.elapsed_time(end) / 1e3))
        out[name] = [round(r / 1e9, 2) for r in rates[1:]]
    best = max(statistics.median(rates) for rates in out.values())
    return {"gb_per_s": out, "bytes_per_s": best * 1e9}
