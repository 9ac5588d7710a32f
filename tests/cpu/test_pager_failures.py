"""What goes wrong while rows are read: an error that names the row, nothing half read ever handed out, and a
pager that works on afterwards."""

import errno
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from store_rows import CORRUPT, DELAY, ERRNO, SHORT, Rows, inject

from moet.errors import StoreError
from moet.layout import RowGeometry
from moet.store import Pager, RowSource

GEOMETRY = RowGeometry("sym2", 64, 96, False)  # rows of 8192 bytes: two pages


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path, {3: GEOMETRY}, 32)


@pytest.mark.parametrize("kind, value, message", [
    (ERRNO, errno.EIO, "errno 5, Input/output error"),
    (ERRNO, errno.ENXIO, "errno 6"),
    (CORRUPT, 0, "checksum of w13 tile 0 does not match"),
    (CORRUPT, GEOMETRY.w2_offset + 10, "checksum of w2 tile 0 does not match"),
    (CORRUPT, 8191, "checksum of extras does not match"),
])  # fmt: skip
def test_a_failed_row_names_file_layer_and_expert_and_is_tried_again(rows, kind, value, message):
    with Pager(rows.sources, budget_bytes=8 * GEOMETRY.row_bytes) as pager:
        inject(pager, 3, 17, kind, value)
        with pytest.raises(StoreError, match=message) as error:
            rows.check(pager, 3, [16, 17, 18])
        assert str(rows.sources[3].path) in str(error.value) and "layer 3, expert 17" in str(error.value)
        counters = pager.counters()
        assert (counters.io_errors, counters.checksum_failures) == ((1, 0) if kind == ERRNO else (0, 1))
        misses = counters.misses
        rows.check(pager, 3, [17])
        assert pager.counters().misses == misses + 1
        rows.check(pager, 3, [17])
        assert pager.counters().misses == misses + 1


def test_rows_that_can_be_read_come_before_the_error(rows):
    with Pager(rows.sources) as pager:
        rows.check(pager, 3, [0, 1, 2])
        inject(pager, 3, 5, ERRNO, errno.EIO)
        seen = []
        with pytest.raises(StoreError):
            for expert, *_ in pager.rows(3, [0, 1, 2, 5]):
                seen.append(expert)
        assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    "kind, value, times", [(SHORT, 100, 50), (SHORT, 4096, 1), (SHORT, 5000, 3), (ERRNO, errno.EINTR, 20)]
)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_short_and_interrupted_reads_are_continued(rows, kind, value, times, direct):
    with Pager(rows.sources, direct_io=direct) as pager:
        inject(pager, 3, 2, kind, value, times)
        if direct and value == 100:
            with pytest.raises(
                StoreError, match="errno 5"
            ):  # less than a page, again and again: no progress is possible
                rows.check(pager, 3, [1, 2, 3])
            return
        rows.check(pager, 3, [1, 2, 3])
        counters = pager.counters()
        assert counters.io_errors == 0 and counters.bytes_read == 3 * 8192
        assert counters.reads > 3 and (counters.short_reads > 0) == (kind == SHORT)


def test_a_slow_row_does_not_hold_the_others(rows):
    with Pager(rows.sources, io_threads=4) as pager:
        inject(pager, 3, 0, DELAY, 300_000)
        start = time.monotonic()
        order = []
        for expert, *_ in pager.rows(3, list(range(8))):
            order.append(expert)
            if expert == 7:
                assert time.monotonic() - start < 0.3
        assert order[-1] == 0 and time.monotonic() - start >= 0.3


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_no_row_is_seen_before_its_last_byte(rows, direct):
    """Rows arrive in two halves, 20 ms apart, without checksums that could hide it; slots are full of other
    rows' bytes."""
    with Pager(
        rows.sources, budget_bytes=8 * GEOMETRY.row_bytes, chunk_bytes=4096, verify=False, direct_io=direct
    ) as pager:
        rows.check(pager, 3, list(range(32)), scan=True)
        for round_ in range(3):
            for expert in range(32):
                inject(pager, 3, expert, DELAY, 10_000 * (1 + expert % 2), times=1)
            rows.check(pager, 3, list(range(32)), scan=bool(round_ % 2))


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_never_change_a_byte(rows, seed):
    """Faults of all kinds, waves, layers given up half way: rows that are handed out are right, and all can
    be read in the end."""
    rng = random.Random(seed)
    failures = 0
    with Pager(
        rows.sources, budget_bytes=rng.choice([4, 7, 12]) * GEOMETRY.row_bytes, chunk_bytes=4096, io_threads=4
    ) as pager:
        for _ in range(150):
            for _ in range(rng.randrange(3)):
                kind, value = rng.choice([(ERRNO, errno.EIO), (SHORT, 4096), (DELAY, 500), (CORRUPT, 7)])
                inject(pager, 3, rng.randrange(32), kind, value, rng.randrange(1, 3))
            experts = sorted(rng.sample(range(32), rng.choice([1, 2, 4, 32])))
            leave_after = rng.choice([None, None, 1, 3])
            pages = pager.rows(3, experts, rng.random() < 0.3)
            try:
                for i, (expert, *parts) in enumerate(pages):
                    assert tuple(p.tobytes() for p in parts) == rows.parts(3, expert)
                    if i == leave_after:
                        break
            except StoreError:
                failures += 1
            pages.close()
        for expert in range(32):
            inject(pager, 3, expert, SHORT, 8192, 0)
        rows.check(pager, 3, list(range(32)), scan=True)
    assert failures > 5


def test_files_that_cannot_work_are_refused_at_open(rows, tmp_path):
    source = rows.sources[3]
    with pytest.raises(StoreError, match="missing: expected a readable file, found: No such file"):
        Pager({0: RowSource(GEOMETRY, 4, tmp_path / "missing", 0)})
    with pytest.raises(StoreError, match="expected at least .* bytes, found .* cut off"):
        Pager({0: RowSource(GEOMETRY, 33, source.path, source.data_offset)})
    with pytest.raises(StoreError, match="multiple of 4096, found offset 100"):
        Pager({0: RowSource(GEOMETRY, 1, source.path, 100)})
    with pytest.raises(StoreError, match="chunk_bytes a multiple of 4096"):
        Pager(rows.sources, chunk_bytes=5000)


def test_a_file_that_shrinks_under_the_pager(rows):
    source = rows.sources[3]
    with Pager(rows.sources) as pager:
        rows.check(pager, 3, [0])
        os.truncate(source.path, source.data_offset + 8192 * 10)
        rows.check(pager, 3, [0, 9])
        with pytest.raises(StoreError, match="layer 3, expert 20.*end of file"):
            rows.check(pager, 3, [20])


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
/* A file system that opens with O_DIRECT and then cannot read, or that does not even open. */
static int direct = -1;
int open(const char *path, int flags, ...) {
  va_list ap; va_start(ap, flags); mode_t mode = va_arg(ap, mode_t); va_end(ap);
  int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
  if ((flags & O_DIRECT) && !getenv("SHIM_READ")) { errno = EINVAL; return -1; }
  int fd = real(path, flags, mode);
  if (flags & O_DIRECT) direct = fd;
  return fd;
}
int open64(const char *path, int flags, ...) __attribute__((alias("open")));
ssize_t pread(int fd, void *to, size_t n, off_t at) {
  ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
  if (fd == direct) { direct = -1; errno = EINVAL; return -1; }
  return real(fd, to, n, at);
}
ssize_t pread64(int, void *, size_t, off_t) __attribute__((alias("pread")));
"""


@pytest.mark.parametrize("stage", ["open", "read"])
def test_without_o_direct_rows_come_through_the_page_cache_and_are_counted(rows, tmp_path, stage):
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.c", "-ldl"], check=True
    )
    script = f"""
from pathlib import Path
from moet.layout import RowGeometry
from moet.store import Pager, RowSource
source = RowSource(RowGeometry("sym2", 64, 96, False), 32, Path({str(rows.sources[3].path)!r}), 8192)
with Pager({{3: source}}, budget_bytes=65536) as pager:
    data = b"".join(bytes(p) for _, *parts in pager.rows(3, list(range(32)), True) for p in parts)
    c = pager.counters()
    print(len(data), c.rows_direct, c.rows_buffered, c.bytes_buffered, c.files_buffered, pager.warning)
"""
    env = {
        **os.environ,
        "LD_PRELOAD": str(tmp_path / "shim.so"),
        **({"SHIM_READ": "1"} if stage == "read" else {}),
    }
    out = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith(f"{32 * 8192} 0 32 {32 * 8192} 1 row file ")
    assert "O_DIRECT does not work here (Invalid argument); reading through the page cache" in out


def test_buffered_on_request_is_no_warning(rows):
    with Pager(rows.sources, direct_io=False) as pager:
        rows.check(pager, 3, list(range(32)))
        assert pager.warning == "" and pager.counters().rows_buffered == 32


def test_closing_with_reads_queued_does_not_hang(rows):
    pager = Pager(rows.sources, io_threads=1)
    for expert in range(32):
        inject(pager, 3, expert, DELAY, 20_000)
    pager.preheat()
    start = time.monotonic()
    pager.close()
    assert time.monotonic() - start < 0.5


def test_a_demanded_row_overtakes_the_preheat_queue(rows):
    with Pager(rows.sources, io_threads=1) as pager:
        for expert in range(32):
            inject(pager, 3, expert, DELAY, 10_000)
        assert pager.preheat() == 32
        start = time.monotonic()
        rows.check(pager, 3, [31])
        assert time.monotonic() - start < 0.2  # 32 rows would take 0.32 s
        rows.check(pager, 3, list(range(32)))
        assert np.sum(pager.counters().rows_direct + pager.counters().rows_buffered) == 32
