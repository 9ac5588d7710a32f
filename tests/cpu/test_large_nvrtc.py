"""What ptxas says about the prefill GEMMs for Hopper: products stay asynchronous, sums stay in registers. Needs NVRTC, not a GPU."""

import re

import pytest

from moet.kernels.gpu.source import flatten
from moet.layout import FORMATS, RowGeometry
from tests.cpu.test_paging_nvrtc import check, nvrtc


@pytest.mark.parametrize("format", FORMATS)
def test_products_are_not_serialized(format):
    try:
        program = check(nvrtc.nvrtcCreateProgram(flatten(["expert_mlp/large.cuh"]).encode(), b"large.cu", 0, [], []))
    except RuntimeError as e:
        pytest.skip(f"needs the NVRTC library: {e}")
    number = RowGeometry(format, 64, 32, False).format_index
    options = ["--gpu-architecture=sm_90a", "-std=c++17", "--ptxas-options=-v", f"-DFORMAT={number}"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode(errors="replace")
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    assert "Potential Performance Loss" not in text, text   # C7508 to C7520: wgmma in turns, or registers that setmaxnreg cannot move
    assert max(map(int, re.findall(r"(\d+) bytes spill", text))) <= 64, text   # a loop counter of the copying warps, not sums
