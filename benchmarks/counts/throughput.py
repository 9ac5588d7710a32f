"""Which pipe an instruction takes, what pipes take a clock, and the GPUs that the counts are held against.

Lanes a clock and multiprocessor: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"; sm_120's 128 for integer additions are counted as 64, which is what shifts and
byte permutes have. Products a clock: the dense rates of NVIDIA's architecture papers
by multiprocessors, boost clock and 2. PRO 6000's tensor cores add in float32 at the full rate, GeForce's at half of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from counts.sass import Instruction

_FMA = {"FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"}
_HEAVY = {"IMAD", "IDP", "IDP4A"}   # IMAD.MOV and IMAD.SHL too: the compiler's way to spread moves and shifts over pipes
_HALF = {"HFMA2", "HMUL2", "HADD2"}
_LOADS = {"LDG": "LDG", "LD": "LDG", "LDGSTS": "LDGSTS", "LDS": "LDS", "LDSM": "LDS", "STS": "STS", "STG": "STG", "ST": "STG", "SHFL": "SHFL"}
_XU = {"MUFU", "I2F", "F2I", "POPC", "FLO", "BREV", "F2F"}
_LOCAL = {"LDL", "STL"}
_CONTROL = {"BRA", "BSSY", "BSYNC", "EXIT", "NOP", "BAR", "WARPSYNC", "SYNCS", "DEPBAR", "LDGDEPBAR", "YIELD", "NANOSLEEP", "MEMBAR", "ERRBAR", "CALL", "RET", "BREAK", "WARPGROUP", "BRX", "CCTL", "FENCE", "ELECT", "PREEXIT", "ACQBULK", "CGAERRBAR"}
_CONSTANT = {"LDC", "LDCU", "ULDC", "S2R", "S2UR", "CS2R", "R2UR", "REDUX", "VOTE", "VOTEU", "ATOMS", "ATOMG", "ATOM", "RED", "REDG", "UTMALDG", "UBLKCP", "MATCH"}
PIPES = ("alu", "fma", "heavy", "half", "tensor", "LDS", "LDG", "LDGSTS", "STS", "STG", "SHFL", "xu", "local", "uniform", "other")


def pipe(i: Instruction) -> str:
    """One of PIPES. alu: what is none of the others."""
    name = i.name
    if i.is_mma:
        return "tensor"
    for group, found in ((_FMA, "fma"), (_HEAVY, "heavy"), (_HALF, "half"), (_XU, "xu"), (_LOCAL, "local"), (_CONTROL | _CONSTANT, "other")):
        if name in group:
            return found
    return _LOADS.get(name) or ("uniform" if name.startswith("U") else "alu")


@dataclass(frozen=True)
class Architecture:
    """Lanes a clock and multiprocessor of each pipe, and products (multiply-adds) of each kind of MMA."""

    alu: int
    fma: int     # float32
    heavy: int   # IMAD
    half: int    # two bf16 a lane
    bf16: int
    int8: int
    fp8: int     # 0: emulated, with bf16's
    wgmma: int = 0   # bf16
    issue: int = 128


SHARED = 128
"""Bytes a clock and multiprocessor of shared memory, without conflicts of banks."""

ARCHITECTURES = {
    "sm_80": Architecture(half=64, alu=64, fma=64, heavy=64, bf16=1024, int8=2048, fp8=0),
    "sm_86": Architecture(half=64, alu=64, fma=128, heavy=64, bf16=256, int8=1024, fp8=0),
    "sm_89": Architecture(half=64, alu=64, fma=128, heavy=64, bf16=256, int8=1024, fp8=512),
    "sm_90a": Architecture(half=128, alu=64, fma=128, heavy=64, bf16=1024, int8=2048, fp8=0, wgmma=2048),
    "sm_120a": Architecture(half=64, alu=64, fma=128, heavy=64, bf16=256, int8=1024, fp8=512),
}


@dataclass(frozen=True)
class Gpu:
    """bytes_per_s: H200 measured (large copies), else the data sheet's."""

    name: str
    arch: str
    multiprocessors: int
    hertz: float
    bytes_per_s: float
    tensor: float = 1.0   # of the architecture's float products

    def ask(self, bytes_per_weight: float) -> float:
        """Weights a clock and multiprocessor that arrive at full bandwidth."""
        return self.bytes_per_s / bytes_per_weight / self.multiprocessors / self.hertz


GPUS = (
    Gpu("A100 80 GB", "sm_80", 108, 1.41e9, 2.04e12),
    Gpu("RTX 3090", "sm_86", 82, 1.70e9, 0.936e12),
    Gpu("RTX 4090", "sm_89", 128, 2.52e9, 1.01e12),
    Gpu("H200", "sm_90a", 132, 1.98e9, 4.5e12),
    Gpu("RTX 5090", "sm_120a", 170, 2.41e9, 1.79e12),
    Gpu("RTX PRO 6000", "sm_120a", 188, 2.60e9, 1.79e12, tensor=2.0),
)


def products(i: Instruction, arch: Architecture) -> float:
    """Clocks of a multiprocessor's tensor cores that a warp's MMA takes, at their full rate."""
    work = i.fragment_weights * i.columns
    if i.name == "HGMMA":
        return work / arch.wgmma
    rate = arch.int8 if i.name == "IMMA" else arch.fp8 if i.name in ("QMMA", "OMMA") else arch.bf16
    return work / (rate or arch.bf16)


def shared_bytes(i: Instruction) -> int:
    """That a warp's instruction moves between registers and shared memory."""
    if i.name == "LDSM":
        return 512 * int(i.opcode.rsplit(".", 1)[1]) // 4 if i.opcode[-1] in "24" else 128
    if i.name not in ("LDS", "STS"):
        return 0
    return 32 * next((int(b) // 8 for b in i.opcode.split(".") if b in ("64", "128", "U8", "S8", "U16", "S16") and b.isdigit()), 4)


def bounds(counts: Mapping[str, int], shared: int, tensor_clocks: float, weights: int, arch: Architecture) -> dict[str, float]:
    """Weights a clock and multiprocessor that each pipe allows. counts: a warp's instructions by pipe for `weights`; shared: bytes; tensor_clocks: `products` of its MMAs."""
    lanes = lambda *pipes: 32 * sum(counts.get(p, 0) for p in pipes)
    return {
        "alu": arch.alu * weights / max(1, lanes("alu")),
        "fma": weights / max(lanes("fma", "heavy", "half") / arch.fma, lanes("heavy") / arch.heavy, lanes("half") / arch.half, 1e-9),
        "issue": arch.issue * weights / max(1, 32 * sum(counts.values())),
        "shared": SHARED * weights / max(1, shared),
        "tensor": weights / max(1e-9, tensor_clocks),
    }
