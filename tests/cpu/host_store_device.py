"""The device's side of the mailbox, slowly: what tests of the host store do in a GPU's place. state.cuh has the protocol."""

import ctypes
import time

from store_rows import Rows

from moet.store import HostClass, HostStore

SIZE = 4096  # requests of the ring
FAILED = 0xFFFFFFFF


class Request(ctypes.Structure):
    _fields_ = [
        ("cls", ctypes.c_int32),
        ("row", ctypes.c_int32),
        ("taken", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Mailbox(ctypes.Structure):
    _fields_ = [
        ("posted", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 14),
        ("request", Request * SIZE),
    ]


class Device:
    def __init__(self, store: HostStore, rows: Rows) -> None:
        self.store, self.rows = store, rows
        self.box = Mailbox.from_address(store.mailbox) if store.mailbox else None

    def cls(self, layer: int) -> tuple[int, HostClass]:
        return next((i, c) for i, c in enumerate(self.store.classes) if layer in c.layers)

    def location(self, layer: int, expert: int) -> tuple[int, int]:
        """(high half, low half)"""
        _, c = self.cls(layer)
        word = ctypes.c_uint64.from_address(c.location + 8 * (c.layers[layer] + expert)).value
        return word >> 32, word & 0xFFFFFFFF

    def slot(self, layer: int, expert: int) -> int:
        """-1: none"""
        low = self.location(layer, expert)[1]
        return -1 if low in (0, FAILED) else low - 1

    def post(self, layer: int, expert: int, taken: bool = False) -> int:
        """Returns the request's number; taken: it is given up before anyone sees it."""
        number, (index, c) = self.box.posted, self.cls(layer)
        request = self.box.request[number % SIZE]
        request.cls, request.row = index, c.layers[layer] + expert
        if taken:
            self.take(number)
        self.box.posted = (number + 1) % (1 << 32)
        return number

    def take(self, number: int) -> None:
        self.box.request[number % SIZE].taken = (number + 1) % (1 << 32)

    def wait(self, layer: int, expert: int, number: int, limit: float = 10.0) -> bool:
        """True: the row is there; False: this request's read failed. Fails the test after `limit` seconds."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            high, low = self.location(layer, expert)
            if low == FAILED and (high - number) % (1 << 32) < 1 << 31:
                return False
            if low not in (0, FAILED):
                return True
            time.sleep(0.0002)
        raise AssertionError(
            f"layer {layer}, expert {expert}: request {number} was not answered in {limit} s"
        )

    def bytes(self, layer: int, expert: int) -> tuple[bytes, ...]:
        _, c = self.cls(layer)
        start = c.arena + self.slot(layer, expert) * c.slot_bytes
        segments = self.rows.sources[layer].geometry.slice(self.store.rank, self.store.world).segments
        places = self.store.layout(layer).segments
        return tuple(ctypes.string_at(start + at, n) for at, (_, n) in zip(places, segments, strict=True))

    def check(self, layer: int, expert: int) -> None:
        assert self.slot(layer, expert) >= 0, f"layer {layer}, expert {expert} is not in the arena"
        assert self.bytes(layer, expert) == self.rows.parts(layer, expert, self.store.rank, self.store.world)

    def seen(self) -> int:
        counters = self.store.counters()
        return counters.hits + counters.misses

    def fetch(self, layer: int, expert: int) -> int:
        """Requests a row, checks it, lets it go when the server has seen the request; returns its slot."""
        before = self.seen()
        number = self.post(layer, expert)
        assert self.wait(layer, expert, number), self.store.failure_text()
        while self.seen() == before:  # a row that was there is answered by that
            time.sleep(0.0002)
        self.check(layer, expert)
        slot = self.slot(layer, expert)
        self.take(number)
        return slot
