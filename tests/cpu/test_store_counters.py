"""The counters file: one layout for both languages, readable by another process while the pager works."""

import subprocess
import sys

import pytest
from store_rows import Rows

from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.store import Pager, counters
from moet.store.native import lib

GEOMETRY = RowGeometry("sym2", 64, 96, False)


def test_names_are_those_of_the_native_struct():
    assert tuple(lib().moet_counter_names().decode().split()) == counters.NAMES


def test_another_process_reads_them(tmp_path):
    rows, path = Rows(tmp_path, {0: GEOMETRY}, 8), tmp_path / "counters"
    script = f"""
from moet.store import counters
c = counters.read({str(path)!r})
print(c.hits, c.misses, c.bytes_read, c.arena_slots, c.slots_valid)
"""

    def read() -> list[str]:
        out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return out.stdout.split()

    with Pager(rows.sources, counters_path=path, budget_bytes=4 * GEOMETRY.row_bytes) as pager:
        rows.check(pager, 0, [1, 2])
        assert read() == ["0", "2", str(2 * 8192), "4", "2"]
        rows.check(pager, 0, [1, 2, 3])
        assert read() == ["2", "3", str(3 * 8192), "4", "3"]
        assert counters.read(path) == pager.counters()
        with Pager(
            rows.sources, counters_path=path
        ) as second:  # a new file takes the name; the old block stays whole
            rows.check(second, 0, [1])
            assert counters.read(path) == second.counters() != pager.counters()
    assert counters.read(path).misses == 1  # the last values stay


def test_what_is_not_a_counters_file_is_refused(tmp_path):
    path = tmp_path / "c"
    with pytest.raises(StoreError, match="No such file"):
        counters.read(path)
    for block in (b"", b"MOETCNT1", bytes(4096), b"MOETCNT1" + (5).to_bytes(8, "little") + bytes(4096)):
        path.write_bytes(block)
        with pytest.raises(StoreError, match="expected MOETCNT1 and"):
            counters.read(path)
    with pytest.raises(StoreError, match="counters file .*: open: "):
        Pager(Rows(tmp_path, {0: GEOMETRY}, 2).sources, counters_path=tmp_path / "missing" / "c")


def test_latency_quantiles_and_hit_rate(tmp_path):
    rows = Rows(tmp_path, {0: GEOMETRY}, 8)
    with Pager(rows.sources) as pager:
        assert pager.counters().latency_us(0.5) == 0.0 and pager.counters().hit_rate == 1.0
        rows.check(pager, 0, list(range(8)))
        rows.check(pager, 0, list(range(8)))
        c = pager.counters()
        assert sum(c.latency) == 8 and c.hit_rate == 0.5
        assert 0 < c.latency_us(0.5) <= c.latency_us(1.0) == 2 << max(b for b, n in enumerate(c.latency) if n)
