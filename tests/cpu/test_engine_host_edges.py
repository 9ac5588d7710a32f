"""The engine's host side where the machine is short of something or an earlier run left something behind."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace as Fake

import pytest

pytest.importorskip("vllm")
os.environ.setdefault("TRITON_INTERPRET", "1")
from store_rows import DELAY, Rows

from moet.config import MoetConfig
from moet.engine.vllm import device_experts, entry, http, metrics, watch
from moet.engine.vllm import run as runs
from moet.engine.vllm.failure import Words
from moet.engine.vllm.memory import Needs, split
from moet.engine.vllm.run import Run
from moet.errors import EngineError, StoreError
from moet.layout import RowGeometry
from moet.store import HostStore
from moet.store.budget import Machine, arena_budget

# --- run folders


def test_a_process_that_has_the_number_of_a_killed_one_starts_clean(tmp_path, monkeypatch):
    """In a container that is started again processes have the numbers of the last time."""
    monkeypatch.setattr(runs.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(runs, "_made", 0)
    folder = runs.make_run_dir(MoetConfig(), os.getpid())
    Words(folder).add(0, "a failure of the killed run")
    (tmp_path / os.path.basename(folder) / "rank-0.json").write_text("{}")
    monkeypatch.setattr(runs, "_made", 0)   # the next start
    assert runs.make_run_dir(MoetConfig(), os.getpid()) == folder
    assert os.listdir(folder) == [] and Words(folder).count(0) == 0
    Words(folder).add(0, "now")
    monkeypatch.setattr(runs, "_made", 0)
    assert runs.make_run_dir(MoetConfig(), os.getpid() + 1) != folder and Words(folder).count(0) == 1


def test_folders_of_another_container_stay(tmp_path, monkeypatch):
    """Containers may share /dev/shm and not their processes' numbers."""
    other = tmp_path / runs.prefix(1234)
    other = other.with_name(other.name + "999999999-0")
    other.mkdir()
    runs.remove_stale(tmp_path)
    assert other.exists()
    monkeypatch.setattr(runs, "PREFIX", runs.prefix(1234))
    runs.remove_stale(tmp_path)
    assert not other.exists()


def test_a_machine_without_shm(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "SHM", tmp_path / "missing")
    with pytest.raises(EngineError, match="missing.*expected a folder that can be made, found: No such file"):
        runs.make_run_dir(MoetConfig(), os.getpid(), "cuda")
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="file/here: expected a folder that can be made, found: "):
        runs.make_run_dir(MoetConfig(run_dir=str(tmp_path / "file" / "here")), os.getpid())


FULL = """
import sys
from pathlib import Path
from moet.engine.vllm.failure import Words
from moet.errors import MoetError
from moet.layout import RowGeometry
from moet.store import HostStore, RowSource
from moet.store.failures import FailureWords
folder = Path(sys.argv[1])
(folder / "full").write_bytes(bytes(4096))
tries = {
    "words": lambda: FailureWords(folder / "w", 0, 1),
    "page": lambda: Words(str(folder)),
    "counters": lambda: HostStore({0: RowSource(RowGeometry("sym2", 64, 96, False), 4)}, counters_path=folder / "c"),
}
for name, call in tries.items():
    try:
        call()
        print(name, "went well")
    except MoetError as e:
        print(name, str(e))
"""


def test_a_full_memory_file_system_is_said(tmp_path):
    """A page that cannot be had must not be found out by writing to it: that is a SIGBUS, which ends the process without a word."""
    mount = f"mount -t tmpfs -o size=4k none {tmp_path} 2>/dev/null || exit 77; exec {sys.executable} -c \"$0\" {tmp_path}"
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    done = subprocess.run(["unshare", "-Urm", "bash", "-c", mount, FULL], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("needs to mount a file system")
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("No space left on device" in line for line in lines), lines


# --- the watch


class Store:
    mailbox = 1

    def __init__(self) -> None:
        self.io_errors = self.checksum_failures = 0

    def counters(self):
        return self

    def failure_text(self):
        return "row 7: EIO"

    def set_heat(self, heat):
        pass


def test_a_watch_goes_on_after_a_write_that_fails(tmp_path, monkeypatch):
    words, store, said = Words(str(tmp_path)), Store(), []
    monkeypatch.setattr(watch, "COUNTERS_SECONDS", 0.05)
    monkeypatch.setattr(watch.logger, "error", lambda text, *a: said.append(text % a))
    full = threading.Event()
    full.set()

    def counters():
        if full.is_set():
            raise OSError(28, "No space left on device")
        return device_experts_counters()

    (tmp_path / "failures.gpu").write_bytes(bytes(4096))
    looking = watch.Watch(Fake(counters=counters, heat=dict), store, words, 0, tmp_path / "rank-0.device", None)
    looking.start()
    try:
        wait_for(lambda: said)
        full.clear()
        wait_for((tmp_path / "rank-0.device").exists)
        store.io_errors = 1
        with open(tmp_path / "failures.gpu", "r+b") as file:
            file.write(b"\1")
        wait_for(lambda: words.told(0) == 1)
        assert words.message(0) == "row 7: EIO"
        assert sum("No space left" in text for text in said) == 1   # said once, however often it is tried
    finally:
        looking.stop()


def device_experts_counters():
    from moet.kernels.paging.state import COUNTERS
    from moet.moe.device import DeviceCounters

    return DeviceCounters.of([0] * len(COUNTERS))


def wait_for(condition, limit: float = 5.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_errors_before_the_start_explain_nothing_later(tmp_path, monkeypatch):
    """Rows that could not be read ahead are not why a row came late an hour later."""
    (tmp_path / "failures.gpu").write_bytes(bytes(4096))
    words, store = Words(str(tmp_path)), Store()
    store.io_errors = 3
    looking = watch.Watch(Fake(heat=dict, counters=device_experts_counters), store, words, 0, tmp_path / "c", None)
    looking.start()
    try:
        with open(tmp_path / "failures.gpu", "r+b") as file:
            file.write(b"\1")
        wait_for(lambda: words.told(0) == 1)
        assert words.message(0) == watch.LATE
    finally:
        looking.stop()


def test_rows_that_fail_together_have_one_reason(tmp_path):
    """The store knows of an error before the GPU counts it: the reads of the next layer have failed when the first layer's failure is explained."""
    (tmp_path / "failures.gpu").write_bytes(bytes(4096))
    words, store, gpu = Words(str(tmp_path)), Store(), Fake(timeouts=0)
    looking = watch.Watch(Fake(counters=lambda: gpu), store, words, 0, tmp_path / "c", None)

    def fails(count: int) -> str:
        with open(tmp_path / "failures.gpu", "r+b") as file:
            file.write(bytes([count]))
        looking.explain()
        return words.message(0)

    store.io_errors = 2   # a row of this layer, and one of the next
    assert fails(1) == fails(2) == "row 7: EIO"
    gpu.timeouts = 1
    assert fails(3) == fails(4) == watch.LATE   # the others of a step that gave up do not wait, and are not counted as waits
    store.io_errors = 3
    assert fails(5) == "row 7: EIO"


def test_a_client_is_told_the_newest_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "RUNS", [Run("m", True, MoetConfig(), str(tmp_path))])
    words = Words(str(tmp_path))
    for rank, text in ((0, "an hour ago"), (2, "now"), (1, "and later")):
        words.add(rank, text)
        assert http.last_failure() == text


# --- the end


def test_a_stop_does_not_wait_for_all_rows(tmp_path):
    rows = Rows(tmp_path, {3: RowGeometry("sym2", 64, 96, False)}, 1000)
    store, ended = HostStore(rows.sources, io_threads=2), []
    for expert in range(1000):
        store.inject(3, expert, DELAY, 10_000)
    filling = device_experts.Filling(store, None)
    time.sleep(0.1)
    begun = time.monotonic()
    device_experts.close(Fake(stop=lambda: ended.append("watch")), filling, Fake(close=lambda: ended.append("runtime")), store)
    assert time.monotonic() - begun < 2.5 < 1000 * 0.010 / 2
    assert ended == ["watch", "runtime"]
    with pytest.raises(Exception, match="stopped"):
        filling.result()


# --- budgets


@pytest.mark.parametrize("least", [1, 5_000_000, (1 << 30) + 1, 7_777_777_777, 10**12 + 7])
def test_what_a_refusal_says_is_enough_is_enough(least):
    """People set what the message names."""
    needs = Needs(rows=4 * least, least=least, kv_all=0, kv_one=0)
    with pytest.raises(EngineError) as refused:
        split(1 << 50, needs, least - 1)
    named = float(re.search(r"at least ([\d.]+) GiB", str(refused.value))[1])
    assert split(1 << 50, needs, MoetConfig(gpu_gib=named).gpu_bytes(needs.rows)).slots >= least
    assert named <= least / (1 << 30) * 1.01 + 0.01


@pytest.mark.parametrize("free", [5_000_000, (1 << 30) + 1, 7_777_777_777, 10**12 + 7])
def test_what_a_refusal_says_is_there_is_there(free):
    machine = Machine(2 * free, free)
    with pytest.raises(StoreError) as refused:
        arena_budget(machine, 4 * free, free + 1)
    number, unit = re.search(r"at most ([\d.]+) (GiB|MiB)", str(refused.value)).groups()
    wanted = int(float(number) * {"GiB": 1 << 30, "MiB": 1 << 20}[unit])
    assert arena_budget(machine, 4 * free, wanted).ram_bytes == wanted > free * 0.8


def test_ranks_look_at_the_memory_before_any_of_them_takes_some(monkeypatch):
    """A budget that all ranks together can have must not be refused to the one that comes last."""
    free, lock, both, refused = [1000], threading.Lock(), threading.Barrier(2), []
    monkeypatch.setattr(device_experts.Machine, "read", classmethod(lambda cls: cls(2000, free[0])))
    monkeypatch.setattr(device_experts, "get_tp_group", lambda: Fake(barrier=both.wait))

    def rank(number: int) -> None:
        time.sleep(0.2 * number)
        try:
            found = arena_budget(device_experts.memory_of(2), 500, 450, 2).ram_bytes
            with lock:
                free[0] -= found   # pinned
        except StoreError as e:
            refused.append(str(e))

    ranks = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(5)
    assert not refused and free[0] == 100
    device_experts.memory_of(1)   # alone: nobody is waited for


# --- what /metrics and /v1/models show


def test_a_run_folder_that_was_cleaned_away_ends_nothing(tmp_path, monkeypatch):
    """Temporary folders are cleaned of what nobody touched for days; a server that is healthy must not look dead then."""
    run = Run("m", True, MoetConfig(), str(tmp_path))
    monkeypatch.setattr(entry, "RUNS", [run])
    (tmp_path / "rank-0.json").write_text("{}")   # its counters are gone
    assert metrics.read(run) == [] and list(metrics.MoetCollector().collect()) == []
    card = http.mode()
    assert (card["precision"], card["experts"]) == ("base", "pack")
    shutil.rmtree(tmp_path)
    assert metrics.read(run) == [] and http.mode() == card
    assert http.last_failure() == ""
