"""The pager's kernels compile for the GPUs that are supported, without spilling a register. Needs NVRTC, not a GPU."""

import re

import pytest

from moet.kernels.gpu.source import flatten

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
KERNELS = {"resolve", "resolve_lookup", "absent_rows", "fetch_ring", "resolve_scan"}
THREADS = {"fetch_ring": 512}


def check(result):
    assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result[0]
    return result[1] if len(result) == 2 else None


def log_of(arch: str) -> str:
    """What the compiler and the assembler say."""
    try:
        program = check(nvrtc.nvrtcCreateProgram(flatten(["paging/resolve.cuh", "paging/scan.cuh"]).encode(), b"paging.cu", 0, [], []))
    except RuntimeError as e:
        pytest.skip(f"needs the NVRTC library: {e}")
    options = [f"--gpu-architecture={arch}", "-std=c++17", "--ptxas-options=-v", "-diag-suppress=177"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace")
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    return text


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_compiles_without_spills(arch):
    log = log_of(arch)
    assert "warning" not in log, log
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        spilled = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", part)]
        found[part.split("'")[0]] = (sum(spilled), int(re.search(r"Used (\d+) registers", part)[1]), int(re.search(r"(\d+) bytes smem", part)[1]))
    assert set(found) == KERNELS
    for kernel, (spilled, registers, shared) in found.items():
        assert spilled == 0, f"{kernel}: {spilled} bytes"
        assert registers * THREADS.get(kernel, 1024) <= 65536 and shared <= 48 << 10
