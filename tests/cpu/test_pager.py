"""The pager: every byte right whatever the arena held, nothing read twice without need, waves, classes, put,
budget."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_rows import Rows, random_rows

from moet.cache.reference import Bookkeeping
from moet.errors import ConfigError, StoreError
from moet.layout import FORMATS, RowGeometry
from moet.store import Pager, RowSource

SMALL = RowGeometry("sym2", 64, 96, False)  # rows of 8192 bytes
LARGE = RowGeometry("bf16", 64, 96, False)  # rows of 40960 bytes


@pytest.fixture
def small(tmp_path):
    return Rows(tmp_path, {3: SMALL, 4: SMALL}, 32)


def budget(slots: int, geometry: RowGeometry = SMALL) -> int:
    return slots * geometry.row_bytes


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_rank_gets_its_slice(tmp_path, format, direct):
    geometry = RowGeometry(format, 192, 160, format in ("mxfp4", "bf16"))
    rows = Rows(tmp_path, {0: geometry}, 3)
    for world in (1, 2, 3, 5):
        for rank in range(world):
            with Pager(
                rows.sources, rank=rank, world=world, io_threads=2, direct_io=direct, chunk_bytes=8192
            ) as pager:
                rows.check(pager, 0, [0, 1, 2])
                counters, slot = pager.counters(), pager.classes()[0].slot_bytes
                assert counters.bytes_read == 3 * slot == counters.arena_bytes
                assert slot <= geometry.slice(rank, world).nbytes + 6 * 4096 and slot <= geometry.row_bytes
                assert (counters.rows_direct, counters.rows_buffered) == ((3, 0) if direct else (0, 3))


def test_more_ranks_than_tiles_is_refused(small):
    with pytest.raises(ConfigError, match="3 tiles"):
        Pager(small.sources, rank=0, world=4)


@pytest.mark.parametrize("slots", [4, 8, 9, 31])
def test_prefill_of_more_rows_than_slots_goes_in_waves(tmp_path, slots):
    rows = Rows(tmp_path, {0: SMALL}, 32)
    with Pager(rows.sources, budget_bytes=budget(slots)) as pager:
        for scan in (True, False, True):
            rows.check(pager, 0, list(range(32)), scan)
        rows.check(pager, 0, [2, 7, 30])
        counters = pager.counters()
        assert counters.waves > 0 and counters.arena_slots == slots == counters.slots_valid
        assert counters.bytes_read == counters.misses * SMALL.row_bytes


def test_hits_read_nothing_and_come_first(small):
    with Pager(small.sources, budget_bytes=budget(16)) as pager:
        small.check(pager, 3, [1, 5, 9])
        before = pager.counters()
        small.check(pager, 3, [1, 5, 9])
        after = pager.counters()
        assert after.bytes_read == before.bytes_read == 3 * SMALL.row_bytes and after.hits == 3
        assert small.check(pager, 3, [0, 1, 2, 5])[:2] == [1, 5]


def test_the_kernel_counts_the_same_reads(small):
    """Bytes read from the device by this process (/proc/self/io), against the pager's own count. Rows are not
    mapped."""

    def device_bytes() -> int:
        return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])

    with Pager(small.sources, budget_bytes=budget(16)) as pager:
        if pager.counters().files_direct == 0:
            pytest.skip("no O_DIRECT on this file system")
        before = device_bytes()
        for _ in range(3):
            small.check(pager, 3, list(range(32)), scan=True)
        assert device_bytes() - before == pager.counters().bytes_direct >= 64 * SMALL.row_bytes
        assert str(small.sources[3].path.parent) not in Path("/proc/self/maps").read_text()


def test_a_scan_does_not_evict_the_working_set(small):
    with Pager(small.sources, budget_bytes=budget(16)) as pager:
        for _ in range(4):
            small.check(pager, 3, [1, 5, 9, 11])
            small.check(pager, 4, [0, 2, 4, 6])
        for _ in range(3):
            for layer in (3, 4):
                small.check(pager, layer, list(range(32)), scan=True)
        before = pager.counters().misses
        small.check(pager, 3, [1, 5, 9, 11])
        small.check(pager, 4, [0, 2, 4, 6])
        assert pager.counters().misses == before


def test_slots_are_those_of_the_specification(small):
    """The pager's plans and counters, with real reads behind them, against moet.cache.reference."""
    rng = np.random.default_rng(7)
    slots, book = 20, Bookkeeping(64, 20)
    hits = misses = waves = 0
    with Pager(small.sources, budget_bytes=budget(slots), io_threads=3) as pager:
        for step in range(300):
            layer, scan = int(rng.integers(2)), step % 40 == 0
            count = 32 if scan else int(rng.integers(1, 8))
            experts = np.sort(
                rng.choice(
                    32, count, replace=False, p=None if scan else (w := 1 / np.arange(1, 33)) / w.sum()
                )
            ).tolist()
            small.check(pager, 3 + layer, experts, scan)
            expected = [
                (s.row - 32 * layer, s.slot, s.wave, s.after, s.hit)
                for s in book.begin([32 * layer + e for e in experts], scan)
            ]
            plan, length = (ctypes.c_int32 * (5 * 32))(), ctypes.c_int32()
            pager._call("plan", plan, 32, ctypes.byref(length))
            assert [tuple(plan[5 * i : 5 * i + 5]) for i in range(length.value)] == expected
            hits, misses = hits + sum(s[4] for s in expected), misses + sum(not s[4] for s in expected)
            waves += max(s[2] for s in expected)
        counters = pager.counters()
        assert (counters.hits, counters.misses, counters.waves) == (hits, misses, waves)
        assert (counters.evictions, counters.admitted, counters.layers) == (
            book.evictions,
            book.admitted,
            300,
        )
        assert np.concatenate(list(pager.heat().values())).tolist() == book.heat
        assert counters.rows_direct + counters.rows_buffered == misses == sum(counters.latency)


@pytest.mark.parametrize("fraction", [0.13, 0.3, 0.5, 0.77, 0.999])
def test_budget_is_used_and_kept(tmp_path, fraction):
    rows = Rows(tmp_path, {0: SMALL, 1: SMALL, 2: LARGE}, 32)
    wanted = int(rows.total * fraction)
    with Pager(rows.sources, budget_bytes=wanted) as pager:
        counters = pager.counters()
        assert 0.9 * wanted <= counters.arena_bytes <= wanted
        coverage = [c.slots / c.rows for c in pager.classes()]
        assert (
            len(coverage) == 2 and max(coverage) - min(coverage) < 0.12
        )  # a large slot is 1.6 % of the bytes
        for layer in range(3):
            rows.check(pager, layer, list(range(32)))


def test_budget_zero_or_too_large_maps_all_rows_and_no_more(small):
    for value in (0, 1 << 40):
        with Pager(small.sources, budget_bytes=value) as pager:
            assert pager.counters().arena_bytes == small.total == pager.counters().bytes_total
            for layer in (3, 4):
                small.check(pager, layer, list(range(32)))
                small.check(pager, layer, list(range(32)))
            assert pager.counters().misses == 64 and pager.counters().evictions == 0


def test_budget_too_small_says_the_minimum_in_bytes_and_the_minimum_works(tmp_path):
    rows = Rows(tmp_path, {0: SMALL, 2: LARGE}, 32)
    with pytest.raises(StoreError, match="at least") as error:
        Pager(rows.sources, budget_bytes=1000)
    minimum = int(re.search(r"at least (\d+) bytes", str(error.value))[1])
    assert minimum == budget(3) + budget(3, LARGE)
    with pytest.raises(StoreError):
        Pager(rows.sources, budget_bytes=minimum - 1)
    with Pager(rows.sources, budget_bytes=minimum) as pager:
        for layer in (0, 2):
            rows.check(pager, layer, list(range(32)))


def test_put_rows_stay_for_good(tmp_path):
    rows = Rows(tmp_path, {0: SMALL}, 8)
    given = random_rows(SMALL, 8, seed=99)
    sources = {**rows.sources, 1: RowSource(SMALL, 8)}
    with pytest.raises(StoreError, match=f"at least {budget(11)} bytes"):
        Pager(sources, budget_bytes=budget(10))
    with Pager(sources, budget_bytes=budget(11)) as pager:
        for expert, row in enumerate(given[:7]):
            pager.put(1, expert, row)
        with pytest.raises(StoreError, match="layer 1, expert 7: expected a row by put"):
            list(pager.rows(1, [0, 7]))
        pager.put(1, 7, given[7])
        for _ in range(3):
            rows.check(pager, 0, list(range(8)))
            for expert, *parts in pager.rows(1, list(range(8))):
                assert np.concatenate(parts).tobytes() == given[expert].tobytes()
        counters = pager.counters()
        assert (
            counters.slots_pinned == 8 == counters.rows_put
            and counters.bytes_read == (counters.misses) * SMALL.row_bytes
        )
        with pytest.raises(StoreError, match="reads its rows from"):
            pager.put(0, 0, given[0])
        with pytest.raises(StoreError, match="expected a contiguous uint8 row of 8192 bytes"):
            pager.put(1, 0, given[0][:-1])
        bad = given[3].copy()
        bad[100] ^= 1
        with pytest.raises(StoreError, match="layer 1, expert 3: checksum of w13 tile 0"):
            pager.put(1, 3, bad)


def test_what_begin_refuses(small):
    with Pager(small.sources) as pager:
        for experts, message in (
            ([3, 3], "distinct experts in ascending order"),
            ([4, 1], "ascending"),
            ([32], "expected an expert of 0..32"),
            ([-1], "expert"),
        ):
            with pytest.raises(StoreError, match=message):
                list(pager.rows(3, experts))
        with pytest.raises(StoreError, match="layer 9: expected one of the layers with experts: .3, 4."):
            list(pager.rows(9, [0]))
        rows = pager.rows(3, [0, 1])
        next(rows)
        with pytest.raises(StoreError, match="layer 3 is still in flight"):
            next(pager.rows(4, [0]))
        rows.close()
        small.check(pager, 4, [0])
        assert small.check(pager, 4, []) == []


def test_closed_pager_says_so_and_closes_twice(small):
    pager = Pager(small.sources)
    pager.close()
    pager.close()
    with pytest.raises(StoreError, match="closed"):
        pager.counters()


def test_memory_stays_within_the_budget(tmp_path):
    """Resident set of a process that reads 16 times the budget: the arena and nothing beside it, and no page
    cache of the rows either."""
    geometry = RowGeometry("bf16", 512, 256, False)
    rows = Rows(tmp_path, {0: geometry}, 1)
    path = tmp_path / "many"
    with path.open("wb") as f:
        for _ in range(128):
            f.write(rows.rows[0].tobytes())
        f.flush()
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_pages(path) == 0
    script = f"""
import sys
from moet.layout import RowGeometry
from moet.store import Pager, RowSource
from pathlib import Path
g = RowGeometry("bf16", 512, 256, False)
def rss():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024
sources = {{0: RowSource(g, 128, Path({str(path)!r}))}}
direct = sys.argv[1] == "1"
with Pager(sources, budget_bytes=8 * g.row_bytes, direct_io=direct, io_threads=4) as pager:
    list(pager.rows(0, [0, 1], True))
    start = rss()
    for _ in range(2):
        for row in pager.rows(0, list(range(128)), True):
            pass
    c = pager.counters()
    print(rss() - start, c.arena_bytes, c.bytes_read)
"""
    for direct in "10":
        out = subprocess.run(
            [sys.executable, "-c", script, direct], capture_output=True, text=True, check=True
        ).stdout.split()
        grown, arena, read = map(int, out)
        assert read >= 16 * arena and grown <= arena + (4 << 20)
        assert cached_pages(path) * 4096 < arena


def cached_pages(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as m:
        pages = -(-len(m) // 4096)
        vector, start = (ctypes.c_ubyte * pages)(), ctypes.addressof(ctypes.c_char.from_buffer(m))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(m)), vector) == 0
        return sum(v & 1 for v in vector)
