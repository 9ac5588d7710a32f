"""Registers, stack, shared memory of every GPU kernel, and for the loops that multiply: instructions a weight by pipe, and what they allow of the memory's bandwidth.

    python benchmarks/kernel_resources.py [--formats tcq2 mxfp4] [--archs sm_90a] [--kernels small] [--loops] [--out docs/results/kernel_resources.json]

Needs no GPU: NVRTC (cuda-bindings and PyTorch's CUDA packages) compiles, cuobjdump (CUDA toolkit, or Triton's package) disassembles. docs/kernel-counts.md says how to read it.
"""

import argparse
import collections
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "counts"), str(Path(__file__).parents[1] / "src")]

from pipes import ARCHITECTURES, GPUS, PIPES, bounds, pipe, products
from sass import Loop, functions, loops
from tools import cuobjdump, dump

from moet.kernels.expert_mlp.cuda import SOURCES
from moet.kernels.gpu.module import cubin
from moet.layout import FORMATS, RowGeometry


def describe(loop: Loop, arch: str) -> dict[str, Any]:
    """A loop's counts: `instructions` of a warp by pipe in one turn, which multiplies `weights`; `bounds` in weights a clock and multiprocessor."""
    counts = collections.Counter(pipe(i) for i in loop.body)
    clocks = sum(products(i, ARCHITECTURES[arch]) for i in loop.mmas)
    limits = bounds(counts, clocks, loop.weights, ARCHITECTURES[arch])
    return {
        "at": loop.address, "weights": loop.weights, "sharing": loop.sharing, "mma": dict(collections.Counter(i.opcode for i in loop.mmas)),
        "instructions": {p: counts[p] for p in PIPES if counts[p]}, "bounds": {k: round(v, 2) for k, v in limits.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--archs", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--kernels", default="", help="only kernels whose name has this in it")
    parser.add_argument("--loops", action="store_true", help="print the opcodes of each loop")
    parser.add_argument("--cuobjdump", type=Path)
    options = parser.parse_args()
    tool = options.cuobjdump or cuobjdump()
    for format in options.formats:
        per_weight = RowGeometry(format, 64, 32, False).block_bytes / 2048
        for arch in options.archs:
            text, resources = dump(tool, cubin(SOURCES, {"FORMAT": FORMATS.index(format)}, arch))
            for name, instructions in functions(text).items():
                if options.kernels not in name:
                    continue
                local = sum(pipe(i) == "local" for i in instructions)
                print(f"{format} {arch} {name}: {resources[name]}, {local} local accesses, {len(instructions)} instructions")
                for loop in loops(instructions):
                    found = describe(loop, arch)
                    each = {p: round(32 * n / loop.weights, 3) for p, n in found["instructions"].items()}
                    print(f"  loop {loop.address:#x}: {loop.weights} weights a warp, {loop.sharing:.2f} MMAs a fragment, {found['mma']}")
                    print(f"    lane instructions a weight: {each}, all {32 * len(loop.body) / loop.weights:.3f}")
                    print(f"    weights a clock and SM: {found['bounds']}; " + ", ".join(f"{g.name} asks {g.ask(per_weight):.1f}" for g in GPUS if g.arch == arch))
                    if options.loops:
                        print("   ", dict(collections.Counter(i.opcode for i in loop.body).most_common()))


if __name__ == "__main__":
    main()
