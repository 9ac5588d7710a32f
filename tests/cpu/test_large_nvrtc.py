"""What ptxas says about the prefill GEMMs for Hopper, and what it made of them: products stay asynchronous, sums and operands stay in registers. Needs NVRTC, not a GPU."""

import functools
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from counts import tools
from counts.sass import functions, loops, written_before_a_wait

from moet.kernels.gpu.source import flatten
from moet.layout import FORMATS, RowGeometry
from tests.cpu.test_paging_nvrtc import check, nvrtc


@functools.cache
def compiled(format: str) -> tuple[str, bytes]:
    """What compiler and assembler say, and the machine code."""
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
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    return text, code


@pytest.mark.parametrize("format", FORMATS)
def test_products_are_not_serialized(format):
    text, _ = compiled(format)
    assert "Potential Performance Loss" not in text, text   # C7508 to C7520: wgmma in turns, or registers that setmaxnreg cannot move
    assert max(map(int, re.findall(r"(\d+) bytes spill", text))) <= 144, text   # of the copying warps, with 32 registers, and of fetching; the loop that multiplies: see below


@pytest.mark.parametrize("format", FORMATS)
def test_registers_belong_to_a_product_until_it_is_waited_for(format):
    """ptxas gives A's registers to the next values as soon as the instruction is out, if it is let: the results are then wrong now and then, on a GPU only."""
    try:
        tool = tools.cuobjdump()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    kernels = functions(tools.dump(tool, compiled(format)[1])[0])
    for name in ("gate_up_large", "down_large"):
        instructions = kernels[name]
        products = [i for i in instructions if i.name == "HGMMA" and i.operands[1].startswith("R")]
        assert len(products) >= 16, (name, len(products))
        touched = written_before_a_wait(instructions)
        assert not touched, (name, touched[:3])
        spilled = [i for loop in loops(instructions) for i in loop.body if i.name in ("LDL", "STL")]
        assert len(spilled) <= (2 if format == "fp8" else 0), (name, spilled)   # fp8 keeps a second set of sums
