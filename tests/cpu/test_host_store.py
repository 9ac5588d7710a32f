"""The host store: rows where a device finds them, and a server that brings what it asks for. Whether that holds with many threads is
test_host_store_stress.py's question."""

import ctypes
import errno
import time

import numpy as np
import pytest
from host_store_device import FAILED, SIZE, Device
from store_rows import CORRUPT, DELAY, ERRNO, SHORT, Rows

from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.store import HostStore, Pager, RowSource
from moet.store.failures import FailureWords

SMALL = RowGeometry("sym2", 64, 96, False)  # rows of 8192 bytes: two pages
LARGE = RowGeometry("nvfp4", 128, 96, False)
ROW = SMALL.row_bytes


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path, {3: SMALL}, 32)


def absent(device: Device) -> list[int]:
    return [e for e in range(32) if device.slot(3, e) < 0]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_a_full_arena_needs_no_mailbox(tmp_path, world, direct):
    rows = Rows(tmp_path, {1: SMALL, 2: LARGE, 5: SMALL}, 16)
    for rank in range(world):
        with HostStore(rows.sources, rank=rank, world=world, direct_io=direct) as store:
            device = Device(store, rows)
            assert store.mailbox == 0 and all(c.resident and c.arena_slots == c.rows for c in store.classes)
            assert store.row_address(2, 0) == 0
            steps: list[tuple[int, ...]] = []
            assert store.fill(progress=lambda *step, steps=steps: steps.append(step)) == 48
            assert steps == [(48, 48)]
            for layer in rows.sources:
                _, c = device.cls(layer)
                assert c.arena % 4096 == 0 and c.location % 64 == 0
                for expert in range(16):
                    row = c.layers[layer] + expert
                    assert device.location(layer, expert) == (1, row + 1)
                    assert store.row_address(layer, expert) == c.arena + row * c.slot_bytes
                    device.check(layer, expert)
            counters = store.counters()
            assert (
                counters.bytes_read
                == sum(c.rows * c.slot_bytes for c in store.classes)
                == counters.arena_bytes
            )
            assert store.fill() == 0  # nothing is read twice
            assert store.warning == "" and (counters.bytes_direct > 0) == direct


def test_classes_are_the_pagers(tmp_path):
    rows = Rows(tmp_path, {1: SMALL, 2: LARGE, 5: SMALL}, 16)
    sources = rows.sources | {7: RowSource(SMALL, 4)}
    budget = 4 * ROW + 21 * LARGE.row_bytes
    with HostStore(sources, ram_bytes=budget) as store, Pager(sources, budget_bytes=budget) as pager:
        assert [(c.slot_bytes, c.rows, c.arena_slots) for c in store.classes] == [
            (c.slot_bytes, c.rows, c.slots) for c in pager.classes()
        ]
        assert [dict(c.layers) for c in store.classes] == [{7: 0}, {1: 0, 5: 16}, {2: 0}]
        assert [c.resident for c in store.classes] == [True, False, False]
    with pytest.raises(StoreError, match=r"expected at least \d+ bytes .* found 5"):
        HostStore(sources, ram_bytes=5)


def test_rows_that_are_put(rows):
    with HostStore({0: RowSource(SMALL, 32)} | rows.sources, ram_bytes=40 * ROW) as store:
        rows.sources[0], rows.rows[0] = rows.sources[3], rows.rows[3]
        device = Device(store, rows)
        store.put(0, 5, rows.rows[3][5])
        device.check(0, 5)
        assert device.location(0, 5) == (1, 6)
        bad = rows.rows[3][6].copy()
        bad[100] ^= 1
        with pytest.raises(StoreError, match="layer 0, expert 6: checksum of w13 tile 0 does not match"):
            store.put(0, 6, bad)
        assert device.slot(0, 6) == -1
        store.put(0, 6, rows.rows[3][6])
        device.check(0, 6)
        with pytest.raises(StoreError, match="rows are read from"):
            store.put(3, 0, rows.rows[3][0])
        with pytest.raises(StoreError, match="expected a contiguous uint8 row of 8192 bytes"):
            store.put(0, 1, bad[:-1])
        number = device.post(0, 7)
        assert not device.wait(0, 7, number)
        assert "layer 0, expert 7: expected a row by put(), found none" in store.failure_text()


def test_the_coldest_row_goes_and_ties_go_by_slot(rows):
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        assert [device.fetch(3, e) for e in (9, 8, 7, 6)] == [0, 1, 2, 3]  # free slots first
        assert device.fetch(3, 9) == 0  # there already: no read, but heat
        assert device.fetch(3, 1) == 1  # 8, 7 and 6 are equally cold
        assert sorted(absent(device)) == sorted(set(range(32)) - {9, 1, 7, 6})
        store.set_heat({3: np.arange(32, dtype=np.uint32) * 100})
        assert device.fetch(3, 2) == 1  # 1 is the coldest now
        assert device.fetch(3, 0) == 1 and device.fetch(3, 3) == 1
        counters = store.counters()
        assert (counters.hits, counters.misses, counters.evictions) == (1, 8, 4)
        assert store.heat()[3][3] == 316


def test_heat_fades(rows):
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        for _ in range(15):
            device.fetch(3, 0)
        assert store.heat()[3][0] == 240
        device.fetch(3, 0)  # the sixteenth request of four slots
        assert store.heat()[3][0] == 128


def test_a_row_is_kept_until_it_is_taken_and_requests_wait_in_order(rows):
    with HostStore(rows.sources, ram_bytes=3 * ROW) as store:
        device = Device(store, rows)
        numbers = [device.post(3, e) for e in range(6)]
        for e in range(3):
            assert device.wait(3, e, numbers[e])
        time.sleep(0.05)
        assert absent(device) == list(range(3, 32))  # all slots are kept
        device.take(numbers[1])
        assert device.wait(3, 3, numbers[3])
        assert absent(device) == [1, *range(4, 32)]
        device.take(numbers[3])
        device.take(numbers[2])
        assert device.wait(3, 4, numbers[4]) and device.wait(3, 5, numbers[5])
        assert absent(device) == [1, 2, 3, *range(6, 32)]
        for e in (0, 4, 5):
            device.check(3, e)


def test_a_request_that_was_given_up_is_not_read(rows):
    with HostStore(rows.sources, ram_bytes=3 * ROW) as store:
        device = Device(store, rows)
        numbers = [device.post(3, e) for e in range(4)]
        for e in range(3):
            assert device.wait(3, e, numbers[e])
        device.take(numbers[3])  # before its turn
        device.post(3, 10, taken=True)
        device.take(numbers[0])
        device.fetch(3, 20)
        assert device.slot(3, 3) == device.slot(3, 10) == -1
        assert store.counters().reads == 4


def test_generations_tell_a_row_from_its_next_stay(rows):
    with HostStore(rows.sources, ram_bytes=3 * ROW) as store:
        device = Device(store, rows)
        seen = set()
        for _ in range(4):
            for e in range(4):
                device.fetch(3, e)
                seen.add((device.slot(3, e), device.location(3, e)[0]))
        assert len(seen) == store.counters().misses > 8


@pytest.mark.parametrize("kind, value, message", [
    (ERRNO, errno.EIO, "errno 5, Input/output error"),
    (CORRUPT, 10, "checksum of w13 tile 0 does not match"),
])  # fmt: skip
def test_a_row_that_cannot_be_read(rows, kind, value, message):
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        for e in range(4):
            device.fetch(3, e)
        store.inject(3, 17, kind, value)
        numbers = {e: device.post(3, e) for e in (16, 17, 18)}
        assert not device.wait(3, 17, numbers[17])
        assert device.location(3, 17) == (numbers[17], FAILED)
        assert str(rows.sources[3].path) in store.failure_text() and message in store.failure_text()
        assert "layer 3, expert 17" in store.failure_text()
        for e in (16, 18):
            assert device.wait(3, e, numbers[e])
            device.check(3, e)
        for number in numbers.values():
            device.take(number)
        again = device.post(3, 17)  # the old failure is not this request's
        assert device.wait(3, 17, again)
        device.check(3, 17)


def test_a_failure_is_said_to_all_who_asked(rows):
    """Two requests share a read that ends with a bad checksum."""
    source = rows.sources[3]
    with source.path.open("r+b") as file:
        file.seek(source.data_offset + 17 * ROW + 9)
        file.write(b"\xff" if rows.rows[3][17, 9] != 255 else b"\0")
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        store.inject(3, 17, DELAY, 200_000)
        first, second = device.post(3, 17), device.post(3, 17)
        assert not device.wait(3, 17, first) and not device.wait(3, 17, second)
        assert device.location(3, 17) == (second, FAILED)
        assert store.counters().checksum_failures == 1


def test_a_failure_that_was_overwritten_is_made_good(rows):
    """One request has not seen yet that its read failed; another one gets the row: it is kept for both."""
    with HostStore(rows.sources, ram_bytes=3 * ROW) as store:
        device = Device(store, rows)
        store.inject(3, 17, ERRNO, errno.EIO)
        first = device.post(3, 17)
        assert not device.wait(3, 17, first)
        second = device.post(3, 17)
        assert device.wait(3, 17, second)
        device.take(second)
        for e in range(8):
            device.fetch(3, e)
        device.check(3, 17)  # not taken by the first
        device.take(first)
        store.set_heat({3: np.where(np.arange(32) == 17, 0, 1000).astype(np.uint32)})
        device.fetch(3, 20)
        assert device.slot(3, 17) == -1


def test_short_reads_and_slow_rows(rows):
    with HostStore(rows.sources, ram_bytes=8 * ROW, io_threads=4) as store:
        device = Device(store, rows)
        store.inject(3, 1, SHORT, 4096, 1)
        store.inject(3, 2, DELAY, 400_000)
        start = time.monotonic()
        numbers = {e: device.post(3, e) for e in (2, 1, 3)}
        for e in (1, 3):
            assert device.wait(3, e, numbers[e])
            device.check(3, e)
        assert time.monotonic() - start < 0.35  # a slow row does not hold the others
        assert device.wait(3, 2, numbers[2])
        device.check(3, 2)
        assert store.counters().short_reads == 1 and store.counters().io_errors == 0


def test_a_dead_server_answers_nothing_and_can_be_closed(rows):
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        store.inject(3, 5, DELAY, 100_000)
        device.post(3, 5)
        time.sleep(0.02)
        store.stop_server()  # in the middle of a read
        number = device.post(3, 6)
        with pytest.raises(AssertionError, match="was not answered"):
            device.wait(3, 6, number, limit=0.3)
        assert device.slot(3, 5) == -1


def test_requests_that_make_no_sense(rows):
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        request = device.box.request[0]
        request.cls, request.row = 7, 5
        device.box.posted = 1
        device.fetch(3, 1)
        assert "request 0: expected a row of a slot class, found row 5 of class 7" in store.failure_text()
        device.box.posted = device.box.posted + SIZE + 100  # more than the ring holds
        device.fetch(3, 2)


def test_request_numbers_wrap(rows):
    with HostStore(rows.sources, ram_bytes=3 * ROW) as store:
        device = Device(store, rows)
        posted = (1 << 32) - 5  # as if that many had been posted and taken
        for n in range(posted - SIZE, posted):
            device.take(n)
        device.box.posted = posted
        time.sleep(0.1)
        for e in range(12):
            device.fetch(3, e)
        store.inject(3, 20, ERRNO, errno.EIO)
        number = device.post(3, 20)
        assert number < 100 and not device.wait(3, 20, number)


def test_an_idle_server_sleeps(rows):
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        device.fetch(3, 1)
        time.sleep(1.2)
        start = time.process_time()
        time.sleep(1)
        assert time.process_time() - start < 0.3
        start = time.monotonic()
        device.fetch(3, 2)
        assert time.monotonic() - start < 1


def test_fill_takes_the_hottest(rows):
    heat = np.zeros(32, np.uint32)
    heat[[4, 9, 20, 31, 2]] = [50, 10, 30, 40, 20]
    with HostStore(rows.sources, ram_bytes=4 * ROW) as store:
        device = Device(store, rows)
        assert store.fill() == 0  # nothing is known to be hot
        store.inject(3, 31, ERRNO, errno.EIO)
        assert store.fill({3: heat}) == 3  # left to the request that needs it
        assert set(range(32)) - set(absent(device)) == {4, 20, 2}
        for e in (4, 20, 2):
            device.check(3, e)
        assert store.fill() == 1 and device.slot(3, 31) >= 0
        assert device.fetch(3, 0) == device.slot(3, 0) and device.slot(3, 2) == -1  # 2 was the coldest
        with pytest.raises(StoreError, match="heat of layer 3: expected 32 values, found none"):
            store.fill({})


def test_a_broken_row_stops_the_fill_of_a_class_without_requests(rows):
    with HostStore(rows.sources) as store:
        store.inject(3, 8, CORRUPT, 5)
        with pytest.raises(StoreError, match="layer 3, expert 8: checksum of w13 tile 0"):
            store.fill()
        assert store.fill() == 1  # all others are there
        Device(store, rows).check(3, 8)


def test_failure_words_are_shared(rows, tmp_path):
    path = tmp_path / "failures"
    with (
        HostStore(rows.sources, rank=0, world=2, failures_path=path) as a,
        HostStore(rows.sources, rank=1, world=2, failures_path=path) as b,
    ):
        assert a.failure_words.counts() == b.failure_words.counts() == (0, 0)
        word = ctypes.c_uint32.from_address(b.failures)
        word.value += 3
        assert a.failure_words.counts() == (0, 3)
    again = FailureWords(path, 1, 2)
    assert again.counts() == (0, 0)
    again.close()
    with pytest.raises(StoreError, match="failures file .* found: "):
        FailureWords(tmp_path / "missing" / "words", 0, 1)


def test_a_closed_store_says_so(rows):
    store = HostStore(rows.sources)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="found a closed one"):
        store.fill()
    with pytest.raises(StoreError, match="missing: expected a readable file"):
        HostStore({0: RowSource(SMALL, 4, rows.sources[3].path.with_name("missing"))})
