"""The counting of machine code (benchmarks/kernel_resources.py): on small pieces of SASS, and what of the committed counts follows from the kernels' sources."""

import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import kernel_resources
from counts import tools
from counts.modules import MODULES, code_hash
from counts.sass import functions, loops, written_before_a_wait
from counts.throughput import ARCHITECTURES, GPUS, pipe

from moet.kernels.expert_mlp.cuda import NUMBERS
from moet.kernels.gpu.source import KERNELS, flatten
from moet.moe.device import PAGER_SOURCES

SASS = """
	code for sm_90a
		Function : multiply
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
        /*0010*/                   IMAD.MOV.U32 R2, RZ, RZ, RZ ;          /* 0x0 */
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR8][R2.64] ;   /* 0x0 */
        /*0030*/                   PRMT R8, R4, 0x5410, R5 ;              /* 0x0 */
        /*0040*/                   LOP3.LUT R9, R4, 0xf, RZ, 0xc0, !PT ;  /* 0x0 */
        /*0050*/                   IMMA.16832.S8.S8 R12, R8.ROW, R16.COL, R12 ;   /* 0x0 */
        /*0060*/                   IMMA.16832.S8.S8 R20, R8.ROW, R18.COL, R20 ;   /* 0x0 */
        /*0070*/              @!P1 BRA 0xf0 ;                             /* 0x0 */
        /*0080*/                   LDS.64 R8, [R3] ;                      /* 0x0 */
        /*0090*/                   IMMA.16832.S8.S8 R12, R8.ROW, R16.COL, R12 ;   /* 0x0 */
        /*00a0*/                   FFMA R30, R12, R31, R30 ;              /* 0x0 */
        /*00b0*/              @P0  BRA 0x20 ;                             /* 0x0 */
        /*00c0*/                   STG.E [R2.64], R30 ;                   /* 0x0 */
        /*00d0*/              @P2  BRA 0x10 ;                             /* 0x0 */
        /*00e0*/                   EXIT ;                                 /* 0x0 */
        /*00f0*/                   NANOSLEEP 0x14 ;                       /* 0x0 */
        /*0100*/              @P3  BRA 0xf0 ;                             /* 0x0 */
        /*0110*/                   BRA 0x80 ;                             /* 0x0 */
        /*0120*/                   BRA 0x120;                             /* 0x0 */
		Function : alternatives
        /*0000*/                   ULDC UR4, c[0x0][0x2c4] ;              /* 0x0 */
        /*0010*/                   HFMA2.BF16_V2 R4, R4, R5, -RZ ;        /* 0x0 */
        /*0020*/              @P0  BRA 0x70 ;                             /* 0x0 */
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;   /* 0x0 */
        /*0040*/                   HADD2 R4, R4, R5 ;                     /* 0x0 */
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;   /* 0x0 */
        /*0060*/                   BRA 0x80 ;                             /* 0x0 */
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;   /* 0x0 */
        /*0080*/              @!P1 BRA 0x10 ;                             /* 0x0 */
        /*0090*/                   EXIT ;                                 /* 0x0 */
		Function : jumps_through_a_table
        /*0000*/                   BRX R86 -0x10 ;                        /* 0x0 */
        /*0010*/                   MOV R4, RZ ;                           /* 0x0 */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;  /* 0x0 */
        /*0030*/              @P0  CALL.REL.NOINC 0x50 ;                  /* 0x0 */
        /*0040*/                   BRA 0x20 ;                             /* 0x0 */
        /*0050*/                   IMMA.16832.S8.S8 R12, R8.ROW, R16.COL, R12 ;   /* 0x0 */
        /*0060*/              @P1  BRA 0x50 ;                             /* 0x0 */
        /*0070*/                   CALL.ABS.NOINC R20 ;                   /* 0x0 */
        /*0080*/                   EXIT ;                                 /* 0x0 */
"""


def test_the_inner_loop_is_found_and_what_a_turn_may_leave_out():
    found = functions(SASS)
    assert set(found) == {"multiply", "alternatives", "jumps_through_a_table"} and len(found["multiply"]) == 19
    (loop,) = loops(found["multiply"])
    # Neither the outer loop's STG belongs to it nor the block out of line, with a loop of its own, which is in the longest way only.
    assert loop.address == 0x20 and [i.address for i in loop.body] == list(range(0x20, 0xC0, 16)) and loop.longest == 13
    # Two products share R8, R9; then a load writes them: 2 fragments of 16 x 32.
    assert loop.weights == 2 * 512 and loop.sharing == 1.5
    counted = kernel_resources.describe_loop(loop, "sm_90a")
    assert counted["instructions"] == {"alu": 2, "fma": 1, "tensor": 3, "LDS": 1, "LDG": 1, "other": 2}
    # 64 lanes a clock for 2 x 32; 128 lanes for 10 x 32; 128 bytes for 8 x 32; 2048 products for 3 x 16 x 8 x 32.
    assert counted["bounds"] == {"alu": 1024.0, "fma": 4096.0, "issue": 409.6, "shared": 512.0, "tensor": round(1024 / 6, 1)}


def test_of_alternatives_the_one_with_the_most_products_counts():
    (loop,) = loops(functions(SASS)["alternatives"])
    assert [i.address for i in loop.body] == [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x80]
    assert loop.weights == 2 * 256   # a warp's 16 of 64 rows, twice: HADD2 writes R4 between
    assert kernel_resources.describe_loop(loop, "sm_90a")["bounds"]["tensor"] == 16.0   # 2048 products a clock, 128 for each weight


def test_loops_behind_a_table_of_jumps_and_behind_a_call_that_is_none():
    found = loops(functions(SASS)["jumps_through_a_table"])
    assert [[i.address for i in loop.body] for loop in found] == [[0x20, 0x30, 0x40], [0x50, 0x60]] and [loop.weights for loop in found] == [256, 512]


@pytest.mark.parametrize(
    ("opcode", "weights"),
    [("HMMA.16816.F32.BF16", 256), ("HMMA.1688.F32.TF32", 128), ("IMMA.16832.S8.S8", 512), ("QMMA.SF.16832.F32.E4M3.E4M3.E8", 512), ("HGMMA.64x8x16.F32.BF16", 256)],
)
def test_weights_of_an_mma(opcode, weights):
    (instruction,) = functions(f"Function : f\n        /*0000*/     {opcode} R4, R8, R10, R4 ;")["f"]
    assert instruction.is_mma and instruction.fragment_weights == weights and instruction.register_a == "R8" and pipe(instruction) == "tensor"


def test_an_mma_of_unknown_shape_is_no_guess():
    (instruction,) = functions("Function : f\n        /*0000*/     HMMA.F32.BF16 R4, R8, R10, R4 ;")["f"]
    with pytest.raises(ValueError, match="expected an MMA whose shape is known"):
        _ = instruction.fragment_weights


def test_what_gpus_ask_for():
    h200 = next(g for g in GPUS if g.name == "H200")
    assert h200.ask(kernel_resources.bytes_of_weight("tcq2")) == pytest.approx(4.5e12 / (576 / 2048) / 132 / 1.98e9)
    assert {g.arch for g in GPUS} == set(ARCHITECTURES)


def test_resources_and_a_missing_cuobjdump(monkeypatch):
    text = " Function mlp_small:\n  REG:128 STACK:16 SHARED:1088 LOCAL:0 CONSTANT[0]:712 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    assert tools.resources(text) == {"mlp_small": {"registers": 128, "stack": 16, "shared": 1088}}
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tools, "TOOLKIT", Path("/nowhere/cuobjdump"))
    with pytest.raises(FileNotFoundError, match="expected it on PATH.*--cuobjdump"):
        tools.cuobjdump()


# --- the committed counts

RESULT = json.loads(kernel_resources.OUT.read_text())
ENTRIES = RESULT["samples"]["modules"]


def test_every_module_is_counted():
    assert MODULES["pager"].sources == PAGER_SOURCES
    found = {(e["module"], e["format"], e["arch"]) for e in ENTRIES}
    assert found == {(name, f, a) for name, m in MODULES.items() for f in m.formats for a in m.archs}


@pytest.mark.parametrize("name", MODULES)
def test_counts_are_of_the_kernels_that_there_are(name):
    """Skipped, and said, where code changed since: counting needs NVRTC."""
    entries = [e for e in ENTRIES if e["module"] == name]
    old = sum(e["source"] != code_hash(MODULES[name].sources) for e in entries)
    if old:
        pytest.skip(f"docs/results/kernel_resources.json is older than {name}, {old} of {len(entries)} compilations: run python benchmarks/kernel_resources.py --modules {name}")
    named = set(re.findall(r"^KERNEL(?:_ALONE)?\((\w+),", flatten(MODULES[name].sources), re.MULTILINE))
    assert {kernel for e in entries for kernel in e["kernels"]} == named


def constant(file: str, pattern: str) -> int:
    """A number in a kernel's source."""
    found = re.search(pattern, (KERNELS / "expert_mlp" / file).read_text())
    assert found, (file, pattern)
    return int(found[1])


def products_of_a_fragment(kernel: str, format: str, arch: str) -> set[int]:
    """MMAs that share an A fragment, by the sources: tiles of 8 columns of activations, in each of the kernel's loops. Empty: not a GEMM."""
    if kernel == "mlp_small":
        return {1, constant("small_integer.cuh", r"constexpr i32 kTiles = (\d+)")} if NUMBERS[format] == 0 else {1}
    if kernel.endswith("_large"):
        # Weights that need no decoding are read from shared memory again for each tile, and count each time.
        return {1 if arch == "sm_90a" or format == "bf16" else constant("large_mma.cuh", r"kPairs = (\d+), kTiles = kPairs / 8") // 8}
    return set()


def test_fragments_are_shared_as_the_sources_say():
    """What the counts are normalised by. Where the sources changed since, the test above says so."""
    for e in (e for e in ENTRIES if e["module"] == "expert_mlp" and e["source"] == code_hash(MODULES["expert_mlp"].sources)):
        for name, kernel in e["kernels"].items():
            assert {loop["sharing"] for loop in kernel["loops"]} == products_of_a_fragment(name, e["format"], e["arch"]), (name, e["format"], e["arch"])


def test_a_turn_of_the_small_kernel_takes_64_rows_of_64_columns():
    for e in (e for e in ENTRIES if e["module"] == "expert_mlp" and e["source"] == code_hash(MODULES["expert_mlp"].sources)):
        assert {loop["weights"] for loop in e["kernels"]["mlp_small"]["loops"]} == {64 * 64}, (e["format"], e["arch"])


def test_a_register_that_is_written_too_early_is_found():
    code = lambda *lines: functions("\t\tFunction : f\n" + "".join(f"        /*{16 * n:04x}*/                   {line} ;\n" for n, line in enumerate(lines)))["f"]
    product, wait = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert not written_before_a_wait(code(product, wait, "LDS R9, [R2]"))
    assert written_before_a_wait(code(product, "LDS R9, [R2]", wait))
    assert written_before_a_wait(code(product, "@P0 BRA 0x30", wait, "IADD3 R11, R2, R3, RZ", wait))   # on one of two ways
    assert not written_before_a_wait(code(product, "IADD3 R12, R8, R9, RZ", wait))
