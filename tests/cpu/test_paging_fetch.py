"""fetch under a mailbox server that is slow, evicts rows while they are copied, fails and dies; in many interleavings, with few blocks running."""

import ctypes
import time
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import pytest
from paging_memory import Memory

from moet.kernels.paging.state import FAILED_ROW, MAILBOX_SIZE, LayerArgs, Mailbox
from tests.cpu.emulator.build import EmulatedModule, compiler

pytestmark = pytest.mark.skipif(compiler is None, reason="needs g++")
HOST = str(Path(__file__).with_name("paging_host.cuh"))


class ReadArgs(ctypes.Structure):
    _fields_ = [
        ("layer", LayerArgs),
        ("disk", c_void_p),
        ("found", c_void_p),
        ("wave", c_int32),
        ("parts", c_int32),
    ]


class HostArgs(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("mailbox", "location", "arena", "disk", "fails")],
        *[(name, c_int32) for name in ("rows", "arena_slots")],
        ("slot_bytes", c_int64),
        *[(name, c_uint32) for name in ("seed", "evicts", "dead", "seen")],
        *[(name, c_uint64) for name in ("served", "evicted", "most_pinned")],
    ]


@pytest.fixture(scope="module")
def module():
    return EmulatedModule(["paging/resolve.cuh", "paging/scan.cuh", HOST])


class Rig:
    """A GPU's memory, and an arena with `arena_slots` of the rows (0: all, and no mailbox)."""

    def __init__(self, module, experts=12, layers=2, slots=8, arena_slots=0, seed=1, evicts=0, slot_bytes=1040, **policy):
        self.module, self.seed = module, seed
        self.rng = np.random.default_rng(seed)
        self.memory = memory = Memory(experts, layers, slots, slot_bytes=slot_bytes, **policy)
        rows = experts * layers
        self.disk = self.rng.integers(0, 256, (rows, slot_bytes), np.uint8)
        self.fails = np.zeros(rows, np.uint8)
        self.location = np.zeros(rows, np.uint64)
        held = arena_slots or rows
        raw = np.zeros(held * slot_bytes + 16, np.uint8)
        self.arena = raw[-raw.ctypes.data % 16 :][: held * slot_bytes].reshape(held, slot_bytes)
        self.arena[:] = self.disk[:held]
        self.location[:held] = (1 << 32) + np.arange(held) + 1
        memory.cls.arena, memory.cls.location = self.arena.ctypes.data, self.location.ctypes.data
        self.mailbox = Mailbox()
        if arena_slots:
            memory.control.mailbox = ctypes.addressof(self.mailbox)
        self.host = HostArgs(
            mailbox=ctypes.addressof(self.mailbox), location=self.location.ctypes.data, arena=self.arena.ctypes.data, disk=self.disk.ctypes.data,
            fails=self.fails.ctypes.data, rows=rows, arena_slots=held, slot_bytes=slot_bytes, seed=seed, evicts=evicts,
        )  # fmt: skip

    @contextmanager
    def served(self):
        self.module.library.host_start(ctypes.byref(self.host))
        try:
            yield
        finally:
            self.module.library.host_stop()

    def layer(self, layer, ids, begins_step=0, parts=4, blocks=6, resident=4, threads=64):
        """One layer: {row: 'whole' | 'failed'}; other bytes fail the test. Checks valid and ready."""
        memory, module = self.memory, self.module
        module.configure(16, 60.0)
        module.seed = int(self.rng.integers(1, 1 << 40))
        args = memory.resolve(module, layer, ids, begins_step=begins_step, threads=128)
        found = np.zeros(memory.plan.count, np.uint64)
        module.configure(resident, 60.0)
        for wave in range(memory.plan.waves + 1):  # one launch too many, as a graph has
            read = ReadArgs(layer=args, disk=self.disk.ctypes.data, found=found.ctypes.data, wave=wave, parts=parts)
            module.launch("read_rows", blocks, threads, read)
        out = {}
        for i, step in enumerate(memory.steps()):
            assert found[i] in (1, 2), f"step {i}, row {step.row}: bytes of another row, or torn ones"
            whole = found[i] == 1
            out[step.row] = "whole" if whole else "failed"
            if step.hit:
                assert whole
            else:
                assert memory.plan.ready[i] == (parts if whole else FAILED_ROW)
            if memory.row_of[step.slot] == step.row:
                assert memory.valid[step.slot] == whole
        return out

    def ids(self, tokens, top_k=4):
        return self.rng.integers(0, self.memory.experts, (tokens, top_k))

    def failures(self):
        return self.memory.failures.value

    def check_whole_pool(self):
        for slot, row in enumerate(self.memory.row_of):
            if row >= 0 and self.memory.valid[slot]:
                bytes_ = self.memory.slot_bytes
                assert (self.memory.pool[slot * bytes_ : (slot + 1) * bytes_] == self.disk[row]).all()


@pytest.mark.parametrize("resident", [1, 2, 8])
@pytest.mark.parametrize("parts", [1, 3, 4, 8])
def test_rows_in_ram(module, parts, resident):
    """Whatever number of blocks runs at a time, fewer than there are parts too."""
    rig = Rig(module, seed=parts * 10 + resident)
    for step in range(12):
        tokens = int(rig.rng.choice([1, 3, 9]))
        blocks = int(rig.rng.choice([1, 2, 7]))
        found = rig.layer(step % 2, rig.ids(tokens), step % 2 == 0, parts, blocks, resident, int(rig.rng.choice([32, 64, 96])))
        assert set(found.values()) == {"whole"}
    rig.check_whole_pool()
    counters = rig.memory.counters()
    assert counters["fetched_rows"] == counters["misses"] > 20
    assert counters["fetched_bytes"] == counters["misses"] * rig.memory.slot_bytes
    assert not any(counters[k] for k in ("arena_misses", "torn_copies", "failed_rows", "timeouts")) and rig.failures() == 0


@pytest.mark.parametrize("seed", range(1, 9))
def test_rows_on_disk_and_evictions_during_the_copy(module, seed):
    rig = Rig(module, arena_slots=[3, 5, 9, 16][seed % 4], seed=seed, evicts=[40, 255][seed % 2], slot_bytes=4112)
    with rig.served():
        for step in range(16):
            tokens, resident = int(rig.rng.choice([1, 2, 8])), int(rig.rng.choice([1, 2, 4, 8]))
            assert set(rig.layer(step % 2, rig.ids(tokens), step % 2 == 0, resident=resident).values()) == {"whole"}
    rig.check_whole_pool()
    counters = rig.memory.counters()
    assert counters["fetched_rows"] == counters["misses"]
    assert counters["arena_misses"] > 5 and counters["timeouts"] == 0 and rig.failures() == 0
    assert rig.memory.control.posted == rig.mailbox.posted == counters["arena_misses"]
    assert rig.host.most_pinned <= rig.host.arena_slots * 4
    for number in range(rig.mailbox.posted):
        assert rig.mailbox.request[number].taken == number + 1


def test_torn_copies_are_made_again(module):
    """Over many seeds some rows do lose their place while they are copied, and none is handed out so."""
    torn = 0
    for seed in range(100, 130):
        rig = Rig(module, arena_slots=8, seed=seed, evicts=256, slot_bytes=16400)
        with rig.served():
            for step in range(6):
                assert set(rig.layer(step % 2, rig.ids(4), 1, resident=8).values()) == {"whole"}
        rig.check_whole_pool()
        torn += rig.memory.counters()["torn_copies"]
        if torn > 20:
            return
    assert torn > 0


@pytest.mark.parametrize("seed", range(4))
def test_failed_reads_fail_alone_and_heal(module, seed):
    rig = Rig(module, arena_slots=4, seed=seed + 50, slots=8)
    rig.fails[::3] = 1
    rig.location[rig.fails == 1] = 0
    counted = 0
    with rig.served():
        for step in range(10):
            before = rig.memory.counters()["failed_rows"]
            found = rig.layer(step % 2, rig.ids(5), 1, resident=int(rig.rng.choice([1, 4])))
            for row, state in found.items():
                assert state == ("failed" if rig.fails[row] else "whole")
            counted += sum(state == "failed" for state in found.values())
            assert rig.memory.counters()["failed_rows"] == rig.failures() == counted >= before
        assert counted > 5
        rig.fails[:] = 0
        for step in range(4):
            assert set(rig.layer(step % 2, rig.ids(5), 1).values()) == {"whole"}
    rig.check_whole_pool()


@pytest.mark.parametrize("resident", [1, 6])
def test_a_dead_server_costs_one_time_limit_a_step(module, resident):
    rig = Rig(module, arena_slots=3, seed=7, slots=6)
    rig.memory.control.limit_ns = 150_000_000
    rig.host.dead = 1
    with rig.served():
        begin = time.monotonic()
        first = rig.layer(1, [[0, 3, 5, 7]], 1, resident=resident)
        took = time.monotonic() - begin
        again = time.monotonic()
        second = rig.layer(0, [[8, 9, 10, 2]], 0, resident=resident)
        assert time.monotonic() - again < took / 2
        assert 0.15 <= took < 5
        assert set(first.values()) == {"failed"}
        assert second[2] == "whole" and second[8] == "failed"  # row 2 is in the arena
        assert rig.memory.counters()["timeouts"] == 1 and rig.failures() == len(first) + 3
        rig.host.dead = 0
        for step in range(6):
            assert set(rig.layer(step % 2, rig.ids(3), 1, resident=resident).values()) == {"whole"}
    for number in range(rig.mailbox.posted):
        assert rig.mailbox.request[number].taken == number + 1


def test_numbers_of_requests_wrap(module):
    rig = Rig(module, arena_slots=3, seed=3)
    rig.memory.control.posted = rig.mailbox.posted = 2**32 - 5
    rig.host.seen = 2**32 - 5
    for i, request in enumerate(rig.mailbox.request):
        request.taken = 2**32 - 2 * MAILBOX_SIZE + i + 1  # of the requests before
    with rig.served():
        for step in range(8):
            assert set(rig.layer(step % 2, rig.ids(3), 1).values()) == {"whole"}
    assert rig.memory.control.posted < 1000


def test_a_baseline_fetches_nothing(module):
    rig = Rig(module)
    rig.memory.control.lookup_only = 1
    args = rig.memory.resolve(module, 0, [[1, 2]], threads=128)
    for i in range(2):
        rig.memory.plan.ready[i] = FAILED_ROW
    found = np.zeros(2, np.uint64)
    module.launch("read_rows", 3, 64, ReadArgs(layer=args, disk=rig.disk.ctypes.data, found=found.ctypes.data, wave=0, parts=4))
    assert found.tolist() == [2, 2] and rig.memory.counters()["fetched_rows"] == 0


def test_stalls_and_time_are_counted(module):
    rig = Rig(module, arena_slots=3, seed=9)
    rig.host.dead = 1
    rig.memory.control.limit_ns = 30_000_000
    with rig.served():
        rig.layer(1, [[5, 6]], 1, resident=8)
    rig.memory.resolve(module, 0, [[1]], threads=128)
    counters = rig.memory.counters()
    assert 30_000_000 <= counters["fetch_nanoseconds"] < 10**10 and 0 < counters["stall_nanoseconds"] < 10**10
