"""The mailbox's server against threads that act as a GPU (host_store_stress.cpp): no byte that they accept is wrong, no request is
lost, a requested row keeps its slot, nothing hangs. Plain, and under ThreadSanitizer and AddressSanitizer."""

import subprocess

import pytest
from store_rows import random_rows
from test_store_stress import build

from moet.layout import RowGeometry

# What gpu.cuh takes from the emulator, as far as its state's declarations need it.
TYPES = """#pragma once
using u8 = unsigned char; using u32 = unsigned int; using i32 = int; using i64 = long long; using u64 = unsigned long long;
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", [None, "thread", "address"])
def test_stress(tmp_path, sanitizer):
    (tmp_path / "emulator.h").write_text(TYPES)
    program = build(tmp_path, sanitizer, "host_store_stress.cpp", ["-DMOET_EMULATOR", f"-I{tmp_path}"])
    if program is None:
        pytest.skip(f"this compiler or kernel cannot run -fsanitize={sanitizer}")
    geometry, layers, experts = RowGeometry("sym2", 64, 96, False), 3, 16
    path = tmp_path / "rows"
    path.write_bytes(random_rows(geometry, layers * experts).tobytes())
    requested = 0
    for slots, threads, rounds in ((3, 1, 200), (3, 3, 200), (7, 4, 300), (20, 4, 600), (40, 2, 600)):
        run = subprocess.run(
            [
                program,
                path,
                *map(str, (layers, experts, geometry.hidden, geometry.inter, slots, threads, rounds, slots)),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stdout + run.stderr[-4000:]
        words = run.stdout.split()
        checked, failed, requests, evictions = (int(words[i]) for i in (1, 3, 7, 9))
        assert checked > 2 * threads * rounds and failed > 0 and evictions > 0
        requested += requests
    assert requested > 4096  # the ring of requests went round
