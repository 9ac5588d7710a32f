"""The pager on the device: the slots of the specification, values that do not depend on what was where, rows from disk, and what happens when a disk fails."""

import errno
import time

import numpy as np
import pytest
import torch
from dequantized import check
from expert_layers import Layers, batch, counters, device_of, open_runtime, registration, table
from store_rows import CORRUPT, DELAY, ERRNO, SHORT

from moet.cache.reference import Bookkeeping
from moet.layout import RowGeometry

EXPERTS, TOP_K = 32, 4
SMALL = RowGeometry("sym2", 64, 96, False)   # rows of 8192 bytes
ZIPF = 1 / np.arange(1, EXPERTS + 1)


@pytest.fixture
def layers() -> Layers:
    return Layers({3: SMALL, 4: SMALL}, EXPERTS)


@pytest.fixture
def opened(emulated):
    """open(layers, slots, folder=None, ...) -> (store, runtime), armed, with GPU memory for about `slots` rows besides the ring (0: for all)."""
    held = []

    def open(layers: Layers, slots: int = 0, folder=None, arena_rows: int = 0, ring: int = 4, limit_s: float = 5.0, decode_tokens: int = 9, **options):
        store = layers.store(folder, register=registration(emulated), ram_bytes=arena_rows * SMALL.row_bytes, **options)
        held.append(store)
        runtime = open_runtime(store, layers, TOP_K, emulated, ring_rows=ring, limit_s=limit_s, decode_tokens=decode_tokens)
        held.append(runtime)
        least = runtime.gpu_bytes_minimum()
        runtime.allocate(max(least, (slots + 2 * ring) * SMALL.row_bytes) if slots else 0, least if slots else None)
        runtime.arm(True)
        return store, runtime

    yield open
    while held:
        held.pop().close()


def specification(runtime) -> Bookkeeping:
    given = runtime.slots[0]
    return Bookkeeping(2 * EXPERTS, given.slots, given.staging)


def expect_plan(book: Bookkeeping, layer: int, ids: torch.Tensor) -> tuple[int, int, int]:
    """(hits, misses, waves) of the specification for a decode step of layer 3 or 4."""
    steps = book.begin([EXPERTS * (layer - 3) + e for e in sorted(set(ids.flatten().tolist()) - {-1})])
    return sum(s.hit for s in steps), sum(not s.hit for s in steps), max((s.wave for s in steps), default=0)


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("slots", [1, 8, 20, 55])
def test_slots_are_those_of_the_specification(layers, slots, tokens, opened, emulated):
    """The same traces as the CPU pager's test: every slot, heat and counter, and every value."""
    _, runtime = opened(layers, slots)
    book, totals = specification(runtime), np.zeros(3, int)
    rng, start = np.random.default_rng(7), counters(runtime)
    for step in range(20 if emulated else 150):
        layer, scan = 3 + int(rng.integers(2)), step % 20 == 7
        x, weights, ids = batch(tokens, 64, EXPERTS, TOP_K, step, device_of(emulated), ZIPF)
        before = table(runtime, 0)
        found = runtime.forward(layer, x, weights, ids, None, scan)
        check(found, layers.reference(layer, x, weights, ids), (step, layer, scan))
        after = table(runtime, 0)
        if scan:   # on the device a scan reads hits in place and streams the rest past the table
            assert all(np.array_equal(before[name], after[name]) for name in ("row_of", "slot_of", "heat", "stamp")), step
            continue
        totals += expect_plan(book, layer, ids)
        assert after["row_of"].tolist() == book.row_of and after["slot_of"].tolist() == book.slot_of, step
        assert after["heat"].tolist() == book.heat, step
        assert np.flatnonzero(after["staged"]).tolist() == sorted(book.staging), step
        assert [s for s in np.argsort(after["stamp"], kind="stable").tolist() if after["staged"][s]] == book.staging, step
        assert (after["evictions"], after["admitted"]) == (book.evictions, book.admitted), step
    found = counters(runtime)
    assert (found.hits - start.hits, found.misses - start.misses) == (totals[0], totals[1])
    assert found.fetched_rows - start.fetched_rows >= totals[1] and found.failed_rows == 0


def test_every_valid_slot_holds_its_rows_bytes(layers, opened, emulated):
    _, runtime = opened(layers, 20)
    for step in range(10):
        for layer in (3, 4):
            runtime.forward(layer, *batch(4, 64, EXPERTS, TOP_K, step, device_of(emulated)), None, False)
    found = table(runtime, 0, pool=True)
    assert found["valid"].all()
    for slot, row in enumerate(found["row_of"]):
        assert found["pool"][slot].tobytes()[: SMALL.row_bytes] == layers.rows[3 + row // EXPERTS][row % EXPERTS].tobytes(), slot


def test_a_routing_that_touches_every_expert_through_the_fewest_slots(layers, opened, emulated):
    _, runtime = opened(layers, 1, ring=2)
    everyone = torch.arange(EXPERTS, dtype=torch.int32, device=device_of(emulated)).reshape(EXPERTS // TOP_K, TOP_K)
    for step in range(2 if emulated else 10):
        x, weights, _ = batch(EXPERTS // TOP_K, 64, EXPERTS, TOP_K, step, device_of(emulated))
        for layer, scan in ((3, False), (4, False), (3, True), (4, False)):
            check(runtime.forward(layer, x, weights, everyone, None, scan), layers.reference(layer, x, weights, everyone), (step, layer, scan))
    assert counters(runtime).waves > 0


def test_a_prefill_leaves_the_working_set_of_decoding(layers, opened, emulated):
    _, runtime = opened(layers, 16)
    few = [batch(1, 64, EXPERTS, TOP_K, 1, device_of(emulated)) for _ in (3, 4)]
    decode = lambda: [runtime.forward(layer, *call, None, False) for layer, call in zip((3, 4), few, strict=True)]
    for _ in range(4):
        decode()
    for step in range(3):
        for layer in (3, 4):
            call = batch(50, 64, EXPERTS, TOP_K, step, device_of(emulated))
            check(runtime.forward(layer, *call, None, True), layers.reference(layer, *call), (step, layer))
    before = counters(runtime)
    decode()
    after = counters(runtime)
    assert after.misses == before.misses and after.fetched_rows == before.fetched_rows and after.scan_misses > 0


def test_preload_takes_the_hottest_and_resize_starts_cold(layers, opened, emulated):
    _, runtime = opened(layers, 40)
    heat = {layer: np.random.default_rng(layer).permutation(EXPERTS).astype(np.uint32) * 10 for layer in (3, 4)}
    runtime.preload(heat)
    flat, found, given = np.concatenate([heat[3], heat[4]]).astype(np.int64), table(runtime, 0), runtime.slots[0]
    there = found["row_of"][found["row_of"] >= 0].tolist()
    assert sorted(flat[there], reverse=True) == sorted(flat, reverse=True)[: given.slots - given.staging]
    assert found["heat"].tolist() == flat.tolist()
    before = found["slots"]
    runtime.resize(18 * SMALL.row_bytes)
    found = table(runtime, 0)
    assert found["slots"] < before and (found["row_of"] < 0).all() and not found["valid"].any()
    call = batch(2, 64, EXPERTS, TOP_K, 1, device_of(emulated))
    check(runtime.forward(3, *call, None, False), layers.reference(3, *call))


@pytest.mark.parametrize("arena_rows", [3, 17, 40])
@pytest.mark.parametrize("verify", [True, False])
def test_rows_from_disk(layers, arena_rows, verify, opened, emulated, tmp_path):
    """Cold and warm, decode and scan, through arenas down to three slots: values as of a resident model, and every row read is counted."""
    store, runtime = opened(layers, 6, tmp_path, arena_rows, verify=verify, io_threads=3)
    for step in range(6 if emulated else 60):
        layer, scan = 3 + step % 2, step % 10 == 9
        call = batch(1 + step % 7, 64, EXPERTS, TOP_K, step, device_of(emulated), ZIPF)
        check(runtime.forward(layer, *call, None, scan), layers.reference(layer, *call), (step, layer, scan))
    found = counters(runtime)
    assert found.failed_rows == found.timeouts == 0 and store.failure_text() == ""
    assert found.arena_misses > 0


def failures(store) -> int:
    import ctypes

    return ctypes.c_uint32.from_address(store.failures).value


def miss_of(runtime, ids: torch.Tensor, layer: int) -> int:
    """An expert of the batch that has no GPU slot."""
    found = table(runtime, 0)
    return next(e for e in sorted(set(ids.flatten().tolist())) if found["slot_of"][EXPERTS * (layer - 3) + e] < 0)


@pytest.mark.parametrize("kind, value, text", [(ERRNO, errno.EIO, "errno 5"), (CORRUPT, 100, "checksum of w13 tile 0")], ids=["EIO", "flipped bit"])
@pytest.mark.parametrize("scan", [False, True], ids=["decode", "scan"])
def test_a_row_that_cannot_be_read_gives_zeros_and_is_counted(layers, scan, kind, value, text, opened, emulated, tmp_path):
    store, runtime = opened(layers, 6, tmp_path, 3)
    x, weights, ids = batch(3, 64, EXPERTS, TOP_K, 5, device_of(emulated))
    bad = miss_of(runtime, ids, 3)
    store.inject(3, bad, kind, value, 1000)
    cold = runtime.forward(3, x, weights, ids, None, scan)
    check(cold, layers.reference(3, x, weights, ids, without=[bad]))
    assert failures(store) > 0 and counters(runtime).failed_rows > 0
    assert f"layer 3, expert {bad}" in store.failure_text() and text in store.failure_text()
    store.inject(3, bad, kind, value, 0)
    before = failures(store)
    for again in range(3):
        check(runtime.forward(3, x, weights, ids, None, scan), layers.reference(3, x, weights, ids), again)
    assert failures(store) == before


def test_short_reads_and_late_reads_are_whole(layers, opened, emulated, tmp_path):
    store, runtime = opened(layers, 6, tmp_path, 3)
    rng = np.random.default_rng(3)
    for step in range(4 if emulated else 25):
        for layer in (3, 4):
            for expert in rng.choice(EXPERTS, 8, replace=False).tolist():
                kind, value = ((SHORT, int(rng.integers(1, 8192))), (DELAY, int(rng.integers(1, 20_000))))[int(rng.integers(2))]
                store.inject(layer, expert, kind, value, 1)
            call = batch(4, 64, EXPERTS, TOP_K, step, device_of(emulated))
            check(runtime.forward(layer, *call, None, False), layers.reference(layer, *call), (step, layer))
    assert counters(runtime).failed_rows == 0 == failures(store)


def test_a_read_that_hangs_is_given_up_once_a_step_and_the_device_lives_on(layers, opened, emulated, tmp_path):
    limit = 0.5
    store, runtime = opened(layers, 6, tmp_path, 3, limit_s=limit)
    x, weights, ids = batch(3, 64, EXPERTS, TOP_K, 5, device_of(emulated))
    bad = miss_of(runtime, ids, 3)
    store.inject(3, bad, DELAY, int(4e6), 1)
    start = time.monotonic()
    found = runtime.forward(3, x, weights, ids, None, False).float().cpu()
    took = time.monotonic() - start
    assert torch.isfinite(found).all() and took < 3.5, "the step must end before the read does"
    assert failures(store) > 0 and counters(runtime).timeouts >= 1
    time.sleep(4.5)
    for again in range(3):
        check(runtime.forward(3, x, weights, ids, None, False), layers.reference(3, x, weights, ids), again)


def test_a_server_that_stopped_fails_steps_and_hangs_nothing(layers, opened, emulated, tmp_path):
    """Its thread is told to end, as if it had died: what needs the disk fails within the limit, what is in memory is right."""
    store, runtime = opened(layers, 12, tmp_path, 3, limit_s=0.5)
    warm = batch(1, 64, EXPERTS, TOP_K, 5, device_of(emulated))
    for _ in range(3):
        check(runtime.forward(3, *warm, None, False), layers.reference(3, *warm))
    store.stop_server()
    start = time.monotonic()
    for step in range(3):
        call = batch(6, 64, EXPERTS, TOP_K, 20 + step, device_of(emulated))
        assert torch.isfinite(runtime.forward(4, *call, None, False).float()).all()
    assert time.monotonic() - start < 10 and failures(store) > 0
    before = failures(store)
    check(runtime.forward(3, *warm, None, False), layers.reference(3, *warm))
    assert failures(store) == before


def captured(runtime, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, emulated: bool):
    """Both layers as a CUDA graph; each call replays it and gives their results."""
    work = lambda: [runtime.forward(layer, x, weights, ids) for layer in (3, 4)]
    if emulated:
        return work
    runtime.arm(False)
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = work()
    runtime.arm(True)
    return lambda: (graph.replay(), outs)[1]


def test_captured_steps_follow_the_specification_cold_and_warm(layers, opened, emulated, tmp_path):
    """Rows from GPU slots, arena and disk, 200 replays: slots of the specification, outputs of a resident runtime, byte for byte."""
    _, resident = opened(layers)
    _, runtime = opened(layers, 12, tmp_path, 20)
    x, weights, ids = batch(2, 64, EXPERTS, TOP_K, 0, device_of(emulated))
    steps, book = [captured(r, x, weights, ids, emulated) for r in (resident, runtime)], specification(runtime)
    for number in range(20 if emulated else 200):
        for tensor, value in zip((x, weights, ids), batch(2, 64, EXPERTS, TOP_K, number, device_of(emulated), ZIPF), strict=True):
            tensor.copy_(value)
        for whole, paged in zip(*(step() for step in steps), strict=True):
            assert torch.equal(whole, paged), number
        for layer in (3, 4):
            expect_plan(book, layer, ids)
        assert table(runtime, 0)["row_of"].tolist() == book.row_of, number


def test_captured_steps_with_faults_are_right_or_counted(layers, opened, emulated, tmp_path):
    """A hundred replays while reads fail, come short, come late and hold a flipped bit: a step whose failure word did not move has the resident runtime's bytes, one whose did is
    finite, and at the end, with the faults gone, all are right."""
    _, resident = opened(layers)
    store, runtime = opened(layers, 6, tmp_path, 8, limit_s=2.0)
    x, weights, ids = batch(2, 64, EXPERTS, TOP_K, 0, device_of(emulated))
    step, rng = captured(runtime, x, weights, ids, emulated), np.random.default_rng(1)
    failed, faulty = 0, 20 if emulated else 100
    for number in range(faulty + 20):
        if number < faulty:
            for _ in range(4):
                fault = ((ERRNO, errno.EIO), (SHORT, 1000), (DELAY, 3000), (CORRUPT, 100))[int(rng.integers(4))]
                store.inject(int(rng.integers(3, 5)), int(rng.integers(EXPERTS)), *fault, 1)
        else:
            for layer, expert in np.ndindex(2, EXPERTS):
                store.inject(3 + layer, expert, ERRNO, 0, 0)
        for tensor, value in zip((x, weights, ids), batch(2, 64, EXPERTS, TOP_K, number, device_of(emulated)), strict=True):
            tensor.copy_(value)
        before = failures(store)
        outs = step()
        counters(runtime)   # the device is done
        if failures(store) == before:
            for layer, out in zip((3, 4), outs, strict=True):
                assert torch.equal(out, resident.forward(layer, x, weights, ids)), number
        else:
            failed += 1
            assert number < faulty and all(torch.isfinite(out.float()).all() for out in outs), number
    assert 0 < failed < faulty
