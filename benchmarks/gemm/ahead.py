"""Compilation beside the run: our kernels before it, one process a format; Humming's while other columns are timed.

    python -m gemm.ahead SHAPES TOKENS       Humming's kernels of these shapes, in this order, into its cache on disk; both lists with commas
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HUMMING_WORKERS = "10"
"""Compilers at a time: the host's other cores launch what is timed."""


def _compile_ours(format: int) -> None:
    from moet.kernels.expert_mlp.cuda import SOURCES
    from moet.kernels.gpu.module import CudaModule

    CudaModule(SOURCES, {"FORMAT": format})


def ours(formats: Sequence[str]) -> None:
    """Into the cache on disk, at the price of one module."""
    from moet.layout import FORMATS

    with ProcessPoolExecutor(len(formats), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_ours, map(FORMATS.index, formats)))


def start_humming(shapes: Sequence[str], tokens: Sequence[int], log: Path) -> subprocess.Popen:
    """The process of `python -m gemm.ahead`; its end need not be waited for: who needs a kernel earlier waits for it, or compiles it."""
    environment = {**os.environ, "HUMMING_MAX_PARALLEL_BUILD_WORKERS": HUMMING_WORKERS}
    command = [sys.executable, "-m", "gemm.ahead", ",".join(shapes), ",".join(map(str, tokens))]
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=Path(__file__).parents[1], env=environment, stdout=file, stderr=subprocess.STDOUT)


def main() -> None:
    import torch

    from gemm.columns import humming
    from gemm.shapes import SHAPES

    humming.choose_compiler()
    tokens = tuple(int(t) for t in sys.argv[2].split(","))
    for name in sys.argv[1].split(","):
        for format in humming.GROUP:
            humming.compile_ahead(SHAPES[name], format, torch.device("cuda", 0), tokens)
            print(name, format, flush=True)


if __name__ == "__main__":
    main()
