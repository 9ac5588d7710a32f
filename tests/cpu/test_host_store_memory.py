"""Pinned memory and budgets: what is registered, in which pieces, and what is said when there is not enough."""

import enum
import errno
import mmap
import sys
import types
from pathlib import Path

import pytest
from store_rows import Rows

from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.store import HostStore, pinned
from moet.store.budget import GIB, Machine, arena_budget, reserve, size

SMALL, LARGE = RowGeometry("sym2", 64, 96, False), RowGeometry("nvfp4", 128, 96, False)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path, {0: SMALL, 1: LARGE}, 24)


def test_all_memory_is_registered_in_whole_rows_and_given_back(rows, monkeypatch):
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 5 * 8192 + 100)
    pieces = []

    def register(address, length):
        pieces.append((address, length))
        return lambda: pieces.remove((address, length))

    store = HostStore(rows.sources, ram_bytes=40 * 8192 + 10 * LARGE.row_bytes, register=register)
    held = [range(a, a + n) for a, n in pieces]

    def owner(address):
        owners = [r for r in held if address in r]
        assert len(owners) == 1
        return owners[0]

    assert (
        sum(map(len, held))
        == sum(c.arena_slots * c.slot_bytes for c in store.classes) + store._control[1] + 4096
    )
    for c in store.classes:
        for slot in range(c.arena_slots):
            start = c.arena + slot * c.slot_bytes
            assert owner(start) == owner(start + c.slot_bytes - 1)  # one copy may not cross two registrations
        assert owner(c.location) == owner(c.location + 8 * c.rows - 1) == owner(store.mailbox)
    assert owner(store.failures)
    store.close()
    assert not pieces


def test_pages_exist_when_they_are_registered(tmp_path):
    big = RowGeometry("sym2", 2048, 1024, False)
    rows = Rows(tmp_path, {0: big}, 1)
    sources = {i: rows.sources[0] for i in range(64)}
    before, at = resident_bytes(), []
    with HostStore(sources, register=lambda address, length: at.append(resident_bytes())) as store:
        arena = store.classes[0].arena_slots * store.classes[0].slot_bytes
        assert arena > 64 << 20 and at[-1] - before > 0.9 * arena


def test_what_cannot_be_registered_is_said(rows, monkeypatch):
    done = []

    def register(address, length):
        if len(done) == 2:
            raise OSError(errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY")
        done.append(address)
        return lambda: done.remove(address)

    with pytest.raises(
        StoreError,
        match=r"pinned memory: expected .* registered with the GPU, found that .* after the "
        r"first .* were refused: .*CUDA_ERROR_OUT_OF_MEMORY.* memlock limit is .* lower the RAM budget",
    ):
        HostStore(rows.sources, register=register)
    assert not done
    monkeypatch.setattr(pinned, "GROWTH_S", 0.1)
    monkeypatch.setattr(pinned.Machine, "read", lambda: Machine(GIB, 100))
    with pytest.raises(
        StoreError,
        match=r"pinned memory: expected .* more, found 100 bytes of 1.0 GiB available, no cgroup limit",
    ):
        HostStore(rows.sources, register=lambda address, length: None)


def test_memory_that_grows_is_waited_for(rows, monkeypatch):
    reads = []

    def read():
        reads.append(0)
        there = GIB if len(reads) < 5 else 9 * GIB
        return Machine(there, there, cgroup_limit=64 * GIB)

    monkeypatch.setattr(pinned.Machine, "read", read)
    at = []
    with HostStore(rows.sources, register=lambda address, length: at.append(len(reads))):
        assert at[0] >= 5  # not before there was room for the first chunk and what else the machine does
    monkeypatch.setattr(pinned, "GROWTH_S", 0.1)
    monkeypatch.setattr(pinned.Machine, "read", lambda: Machine(GIB, GIB, cgroup_limit=64 * GIB))
    HostStore(
        rows.sources, register=lambda address, length: None
    ).close()  # it does not grow: tried all the same


class FakeDriver(types.ModuleType):
    """cuda.bindings.driver, as far as cuda_register needs it: a context and a table of what is registered."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUresult = enum.IntEnum(
        "CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_INVALID_CONTEXT": 201}
    )

    def __init__(self, offset: int = 0, room: int = 1 << 40) -> None:
        super().__init__("driver")
        self.offset, self.room, self.context, self.held = offset, room, 0, {}
        ok = self.CUresult.CUDA_SUCCESS
        self.cuInit = lambda flags: (ok,)
        self.cuDeviceGet = lambda ordinal: (ok, ordinal)
        self.cuCtxGetCurrent = lambda: (ok, self.context)
        self.cuDevicePrimaryCtxRetain = lambda device: (ok, 77 + device)
        self.cuMemHostGetDevicePointer = lambda address, flags: (ok, address + self.offset)

    def cuCtxSetCurrent(self, context):
        self.context = context
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemHostRegister(self, address, length, flags):
        if not self.context:
            return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if length > self.room:
            return (self.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self.held[address] = (length, flags)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address):
        if not self.context:
            return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        del self.held[address]
        return (self.CUresult.CUDA_SUCCESS,)


def test_cuda_register_asks_the_driver(rows, monkeypatch):
    def use(driver):
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = driver
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return driver

    driver = use(FakeDriver())
    with HostStore(rows.sources, register=pinned.cuda_register) as store:
        assert driver.context == 77 and len(driver.held) == 4  # the primary context of device 0
        assert driver.held[store.classes[0].arena] == (24 * 8192, 3)  # portable, mapped
        driver.context = 0  # another thread's view
    assert not driver.held
    driver = use(FakeDriver(offset=4096))
    with pytest.raises(
        StoreError, match="the device sees host address 0x.* as 0x.*; one address for both is needed"
    ):
        HostStore(rows.sources, register=pinned.cuda_register)
    assert not driver.held
    driver = use(FakeDriver(room=8192))
    with pytest.raises(StoreError, match=r"were refused: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        HostStore(rows.sources, register=pinned.cuda_register)
    assert not driver.held


def test_auto_takes_what_is_there_less_a_reserve():
    machine = Machine(total=128 * GIB, available=100 * GIB)
    assert reserve(machine) == 128 * GIB // 20
    assert arena_budget(machine, 72 * GIB).ram_bytes == 72 * GIB
    assert arena_budget(machine, 300 * GIB).ram_bytes == 100 * GIB - reserve(machine)
    assert arena_budget(machine, 300 * GIB, ranks=4).ram_bytes == (100 * GIB - reserve(machine)) // 4
    inside = Machine(128 * GIB, 100 * GIB, cgroup_limit=40 * GIB, cgroup_used=10 * GIB)
    assert arena_budget(inside, 300 * GIB).ram_bytes == 28 * GIB
    assert "10.0 GiB used of a cgroup limit of 40.0 GiB" in arena_budget(inside, 300 * GIB).why
    with pytest.raises(
        StoreError, match="expected more than the 2.0 GiB that are kept .* 1.0 GiB of 16.0 GiB available"
    ):
        arena_budget(Machine(16 * GIB, GIB), 300 * GIB)


def test_a_named_budget_is_checked():
    machine = Machine(16 * GIB, 12 * GIB, memlock=8 << 20)
    assert (
        arena_budget(machine, 300 * GIB, wanted=12 * GIB).ram_bytes == 12 * GIB
    )  # no reserve, and memlock bounds nothing
    assert arena_budget(machine, 5 * GIB, wanted=12 * GIB).ram_bytes == 5 * GIB
    with pytest.raises(
        StoreError, match="expected at most 6.0 GiB for each of 2 rank.* found 8.0 GiB .*Lower the budget"
    ):
        arena_budget(machine, 300 * GIB, wanted=8 * GIB, ranks=2)


def test_memory_that_grows_with_use():
    """MemTotal below the cgroup's limit: `auto` takes what is there, a named budget may take what the limit allows."""
    machine = Machine(total=8 * GIB, available=6 * GIB, cgroup_limit=128 * GIB, cgroup_used=2 * GIB)
    assert arena_budget(machine, 300 * GIB, wanted=100 * GIB).ram_bytes == 100 * GIB
    with pytest.raises(StoreError, match="found 127.0 GiB"):
        arena_budget(machine, 300 * GIB, wanted=127 * GIB)
    budget = arena_budget(Machine(16 * GIB, 15 * GIB, 128 * GIB, 2 * GIB), 300 * GIB)
    assert budget.ram_bytes == 15 * GIB - 128 * GIB // 20 and "would allow 119.6 GiB" in budget.why


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"}


def test_cgroup_v2_the_tightest_group_counts(tmp_path):
    root = tree(tmp_path, MEMINFO | {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "5000000000\n",
        "sys/fs/cgroup/a/memory.max": "8589934592\n", "sys/fs/cgroup/a/memory.current": "6442450944\n",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 1073741824\nactive_file 1073741824\n",
        "sys/fs/cgroup/memory.max": "10737418240\n", "sys/fs/cgroup/memory.current": "3221225472\n",
    })  # fmt: skip
    machine = Machine.read(root)
    assert (machine.total, machine.available) == (16 * GIB, 8 * GIB)
    assert (machine.cgroup_limit, machine.cgroup_used, machine.free) == (8 * GIB, 4 * GIB, 4 * GIB)


@pytest.mark.parametrize("path", ["/", "/not/mounted/here"])
def test_cgroup_v1_as_a_container_sees_it(tmp_path, path):
    root = tree(tmp_path, MEMINFO | {
        "proc/self/cgroup": f"5:cpu,cpuacct:/\n4:memory:{path}\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "3221225472\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1073741824\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 536870912\n",
    })  # fmt: skip
    machine = Machine.read(root)
    assert (machine.cgroup_limit, machine.cgroup_used) == (3 * GIB, GIB // 2)


def test_no_limit_and_no_files(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n"}  # fmt: skip
    assert Machine.read(tree(tmp_path, MEMINFO | files)).cgroup_limit is None
    assert Machine.read(tmp_path / "nothing").free == 0
    here = Machine.read()
    assert 0 < here.free <= max(here.total, here.cgroup_limit or 0)


def test_sizes():
    assert [size(n) for n in (0, 8192, 8 << 20, 3 * GIB // 2)] == [
        "0 bytes",
        "8192 bytes",
        "8.0 MiB",
        "1.5 GiB",
    ]
