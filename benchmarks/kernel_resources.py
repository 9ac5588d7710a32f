"""Registers, stack, shared memory of every GPU kernel, and of the loops that multiply: instructions a weight by pipe, and the weights a clock that they allow.

    python benchmarks/kernel_resources.py [--formats tcq2 mxfp4] [--archs sm_90a] [--modules expert_mlp] [--kernels small] [--opcodes] [--keep]

Needs no GPU: NVRTC (cuda-bindings and PyTorch's CUDA packages) compiles, cuobjdump (CUDA toolkit, or Triton's package) disassembles: 10 s for each format and architecture.
docs/kernel-counts.md says how to read it. What was asked for replaces its part of docs/results/kernel_resources.json; --keep only prints.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import record
from counts.modules import MODULES, code_hash, terms
from counts.sass import Instruction, Loop, functions, loops
from counts.throughput import ARCHITECTURES, GPUS, PIPES, bounds, pipe, products, shared_bytes
from counts.tools import cuobjdump, dump

from moet.kernels.gpu.module import cubin
from moet.layout import FORMATS, RowGeometry

OUT = record.ROOT / "docs" / "results" / "kernel_resources.json"


def describe_loop(loop: Loop, arch: str, terms: int = 1) -> dict[str, Any]:
    """`instructions` of a warp by pipe in one turn, which multiplies `weights`, each in so many A fragments (terms); `sharing`: MMAs of an A fragment; `longest`: instructions of the longest way; `bounds`: weights a clock and multiprocessor."""
    counts, model = Counter(pipe(i) for i in loop.body), ARCHITECTURES[arch]
    clocks, shared = sum(products(i, model) for i in loop.mmas), sum(shared_bytes(i) for i in loop.body)
    weights = loop.weights // terms
    limits = bounds(counts, shared, clocks, weights, model)
    return {
        "weights": weights, "sharing": round(loop.sharing, 2), "mma": dict(Counter(i.opcode for i in loop.mmas)),
        "instructions": {p: counts[p] for p in PIPES if counts[p]}, "longest": loop.longest, "bounds": {k: round(v, 1) for k, v in limits.items()},
    }  # fmt: skip


def describe(instructions: list[Instruction], resources: dict[str, int], arch: str, terms: int = 1) -> dict[str, Any]:
    """local: instructions that access local memory, anywhere in the kernel."""
    local = sum(pipe(i) == "local" for i in instructions)
    return {**resources, "local": local, "instructions": len(instructions), "loops": [describe_loop(loop, arch, terms) for loop in loops(instructions)]}


def show(title: str, kernel: dict[str, Any], found: list[Loop], arch: str, format: str, opcodes: bool) -> None:
    print(f"{title}: {kernel['registers']} registers, {kernel['stack']} bytes of stack, {kernel['shared']} of shared memory, {kernel['local']} accesses to local memory")
    for loop, d in zip(found, kernel["loops"], strict=True):
        weights = d["weights"]
        each = {p: round(32 * n / weights, 3) for p, n in d["instructions"].items()}
        asks = {g.name: round(g.ask(bytes_of_weight(format)), 1) for g in GPUS if g.arch == arch}
        print(f"  loop at {loop.address:#x}: {weights} weights a warp and turn; {d['mma']}, {d['sharing']} for a fragment")
        print(f"    lane instructions a weight: {each}, all {32 * len(loop.body) / weights:.3f}, the longest way {32 * loop.longest / weights:.3f}")
        print(f"    weights a clock and multiprocessor: {d['bounds']}; asked for: {asks}")
        if opcodes:
            print("   ", dict(Counter(i.opcode for i in loop.body).most_common()))


def bytes_of_weight(format: str) -> float:
    return RowGeometry(format, 64, 32, False).block_bytes / 2048


def claims(entries: list[dict[str, Any]]) -> list[record.Claim]:
    """Without the block-scaled kernels where they emulate their products, which is for tests."""
    inner = [loop for e in entries if e["module"] != "expert_mlp_scaled" or e["arch"] == "sm_120a" for kernel in e["kernels"].values() for loop in kernel["loops"]]
    spilling = sum("local" in loop["instructions"] for loop in inner)
    return [record.Claim("K6", f"loops that multiply and touch local memory, of {len(inner)} (formats x architectures x kernels)", spilling, "", 0, "==")]


def write(made: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """All that was counted, in a fixed order."""
    entries = [made[key] for key in sorted(made, key=lambda k: (list(MODULES).index(k[0]), k[1], list(ARCHITECTURES).index(k[2])))]
    asks = {g.name: {f: round(g.ask(bytes_of_weight(f)), 1) for f in FORMATS} for g in GPUS}
    record.write(OUT, claims(entries), {"asked": asks, "modules": entries}, "machine code, not run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--archs", nargs="*", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--modules", nargs="*", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--kernels", default="", help="print only kernels whose name has this in it")
    parser.add_argument("--opcodes", action="store_true", help="print those of each loop")
    parser.add_argument("--keep", action="store_true", help="leave the result file as it is")
    parser.add_argument("--cuobjdump", type=Path)
    options = parser.parse_args()
    tool = options.cuobjdump or cuobjdump()
    old = json.loads(OUT.read_text())["samples"]["modules"] if OUT.exists() else []
    made: dict[tuple[str, str, str], dict[str, Any]] = {(e["module"], e["format"], e["arch"]): e for e in old}
    for name in options.modules:
        module = MODULES[name]
        for format in [f for f in module.formats if f in (*options.formats, "")]:
            for arch in [a for a in module.archs if a in options.archs]:
                text, resources = dump(tool, cubin(module.sources, {"FORMAT": FORMATS.index(format)} if format else {}, arch))
                entry = {"module": name, "format": format, "arch": arch, "source": code_hash(module.sources), "kernels": {}}
                for kernel, instructions in functions(text).items():
                    entry["kernels"][kernel] = describe(instructions, resources[kernel], arch, terms(kernel, format, arch))
                    if options.kernels in kernel:
                        show(f"{format} {arch} {kernel}".strip(), entry["kernels"][kernel], loops(instructions), arch, format, options.opcodes)
                made[name, format, arch] = entry
            if not options.keep:
                write(made)


if __name__ == "__main__":
    main()
