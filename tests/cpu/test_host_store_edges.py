"""The host store where its files shrink, its disk is slow and its memory cannot be given back; with the kernels of the emulator on the other side."""

import os
import time

import pytest
import torch
from store_rows import DELAY

from moet.errors import StoreError
from moet.store import HostStore
from tests.cpu import test_device_runtime as whole
from tests.cpu.test_device_runtime import EXPERTS, TOP_K, Served, equal, trace_of

sources = whole.sources


def calls(layer: int, experts: list[int]):
    ids = torch.tensor(experts, dtype=torch.int32).view(-1, TOP_K)
    g = torch.Generator().manual_seed(9)
    return layer, torch.randn(len(ids), whole.HIDDEN, generator=g).bfloat16(), torch.rand(ids.shape, generator=g), ids


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_shrinks_loses_its_last_rows_only(sources, tmp_path, scan, direct):
    call = calls(2, list(range(EXPERTS)))
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        (right,) = served.run([call])
    source = sources[0][2]
    path = tmp_path / "rows"
    path.write_bytes(source.path.read_bytes())
    cut = {2: type(source)(source.geometry, EXPERTS, path)}
    with HostStore(cut, ram_bytes=3 * source.geometry.row_bytes, io_threads=2, direct_io=direct) as store:
        served = Served.__new__(Served)
        served.store, modules = store, whole.EmulatedModule(whole.SOURCES, {"FORMAT": source.geometry.format_index})
        served.runtime = whole.DeviceRuntime(
            store, activation=whole.ACTIVATION, top_k=TOP_K, device=torch.device("cpu"), max_tokens=64, decode_tokens=8, ring_rows=2, fetch_blocks=2, limit_s=5.0,
            modules={source.geometry.format_index: modules, -1: whole.EmulatedModule(whole.PAGER_SOURCES, {})},
        )  # fmt: skip
        served.runtime.allocate(served.runtime.gpu_bytes_minimum())
        served.runtime.arm()
        os.truncate(path, path.stat().st_size - source.geometry.row_bytes - 100)   # the last row, and the end of the one before
        (found,) = served.run([call], scan)
        assert equal([found[:3]], [right[:3]]) and not equal([found[3:]], [right[3:]]) and torch.isfinite(found).all()
        counters = served.runtime.counters()
        assert (counters.failed_rows, counters.timeouts) == (2, 0) and store.failure_words.counts() == (2,)
        assert "end of file" in store.failure_text() and "layer 2, expert 1" in store.failure_text()
        path.write_bytes(source.path.read_bytes())
        assert equal(served.run([call], scan), [right])


@pytest.mark.parametrize("scan", [False, True])
def test_a_slow_disk_costs_one_limit_and_the_rows_come_later(sources, scan):
    trace = trace_of(1, [3])
    with Served(sources[0]) as served:
        served.runtime.allocate()
        served.runtime.arm()
        right = served.run(trace)
    total = sum(s.experts * s.geometry.row_bytes for s in sources[0].values())
    with Served(sources[0], ram_bytes=total // 3, fill=False, limit_s=0.2) as served:
        served.runtime.allocate(served.runtime.gpu_bytes_minimum())
        served.runtime.arm()
        for expert in range(EXPERTS):
            served.store.inject(2, expert, DELAY, 400_000)
        begun = time.monotonic()
        served.run(trace, scan)
        assert time.monotonic() - begun < 1.5
        assert served.runtime.counters().timeouts == 1 and served.runtime.counters().failed_rows > 0
        while not equal(served.run(trace, scan), right):   # late rows land in the arena, and each is slow once
            assert time.monotonic() - begun < 8
            time.sleep(0.1)
        lost = served.runtime.counters().failed_rows
        assert equal(served.run(trace, scan), right) and served.runtime.counters().failed_rows == lost


def test_memory_that_cannot_be_unregistered_is_closed_all_the_same(sources):
    """A CUDA context that is gone refuses; everything else is given back, once, and the first reason is said."""
    undone = []

    def register(address, length):
        def undo():
            undone.append(address)
            if len(undone) == 1:
                raise RuntimeError("context is destroyed")

        return undo

    store = HostStore(sources[0], register=register)
    words = store.failure_words
    with pytest.raises(RuntimeError, match="context is destroyed"):
        store.close()
    assert len(undone) == 2 + len(store.classes) and words._map.closed
    with pytest.raises(StoreError, match="found a closed one"):
        store.fill()
    store.close()
    assert len(undone) == 2 + len(store.classes)
