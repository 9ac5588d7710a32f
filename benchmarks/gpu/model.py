"""The model that the GPU benchmarks time: a store that holds all its rows in pinned memory, and runtimes over it."""

import gc
import os
from collections.abc import Mapping
from contextlib import contextmanager

import numpy as np
import torch
from report import Report
from rows import Shape, put_all

from moet.models import Activation
from moet.moe.device import DeviceRuntime
from moet.store import HostStore, RowSource
from moet.store.pinned import cuda_register

RING_ROWS = 32


def open_store(shape: Shape, report: Report, device: torch.device) -> HostStore:
    """All rows, each with bytes of its own, in pinned memory. Times: `pin`, `rows`."""
    sources = {layer: RowSource(shape.geometry, shape.experts) for layer in range(shape.layers)}
    with report.timed("pin"):
        store = HostStore(sources, register=cuda_register, verify=False)   # rows without checksums
    with report.timed("rows"):
        say = lambda layer: report.say(f"rows of {layer + 1} layers") if layer % 10 == 9 else None
        put_all(shape, device, store.put, len(os.sched_getaffinity(0)), say)
    report.facts["model"] = {
        "layers": shape.layers, "experts": shape.experts, "hidden": shape.hidden, "inter": shape.inter, "top_k": shape.top_k, "format": shape.format,
        "row_bytes": shape.geometry.row_bytes, "rows_gib": round(shape.bytes / 2**30, 2), "values": "random codes and scales, a row's own",
    }  # fmt: skip
    return store


def gpu_bytes(store: HostStore, coverage: float) -> int:
    """Of slots for this share of the rows, the ring's beside them; 0 for all."""
    if coverage >= 1:
        return 0
    return sum(c.slot_bytes * (round(coverage * c.rows) + 2 * min(RING_ROWS, round(coverage * c.rows) // 14)) for c in store.classes)


@contextmanager
def runtime_over(
    store: HostStore, shape: Shape, device: torch.device, *, decode_tokens: int, max_tokens: int = 0, coverage: float = 1.0, least: float | None = None,
    kind: type[DeviceRuntime] = DeviceRuntime, fetch_blocks: int = 8,
):  # fmt: skip
    """A runtime with slots for `coverage` of the rows, which `resize` may take down to `least`; not armed. The memory of earlier ones is given back first, if nobody
    holds them any more."""
    gc.collect()   # a runtime is part of a cycle
    torch.cuda.empty_cache()
    runtime = kind(
        store, activation=Activation(), top_k=shape.top_k, device=device, max_tokens=max(max_tokens, decode_tokens), decode_tokens=decode_tokens,
        ring_rows=RING_ROWS, fetch_blocks=fetch_blocks,
    )  # fmt: skip
    try:
        runtime.allocate(gpu_bytes(store, coverage), None if least is None else gpu_bytes(store, least))
        runtime.arm(False)
        yield runtime
    finally:
        runtime.close()


def heat_of(ids: np.ndarray, experts: int) -> Mapping[int, np.ndarray]:
    """uint32 [experts] of each layer: 16 for every routing of a trace [steps, layers, tokens, top_k], as a run over it would leave without aging."""
    return {layer: (16 * np.bincount(ids[:, layer].ravel(), minlength=experts)).astype(np.uint32) for layer in range(ids.shape[1])}
