"""How many staging slots: misses a decode step of the pager's policy on the benchmark's trace, by coverage and staging. Arithmetic only, no GPU.

    python benchmarks/gpu/staging.py [--tokens 1] [--steps 300]
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import routing
from residency import Residency

from moet.cache.native import NativeBookkeeping

LAYERS, EXPERTS, TOP_K = 43, 256, 6
COVERAGES = (0.05, 0.10, 0.15, 0.20)
SHARES = (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)


def layer_rows(ids: np.ndarray) -> list[list[np.ndarray]]:
    """Distinct rows of each step's layers, ascending."""
    return [[(np.unique(step[layer]) + layer * EXPERTS).astype(np.int32) for layer in range(LAYERS)] for step in ids]


def paged(steps: list[list[np.ndarray]], slots: int, staging: int) -> float:
    """Misses a step, the mean of the second half."""
    book, missed = NativeBookkeeping(LAYERS * EXPERTS, slots, staging), []
    for step in steps:
        missed.append(sum(int((book.plan(rows)[:, 5] == 0).sum()) for rows in step))
    book.close()
    return float(np.mean(missed[len(missed) // 2 :]))


def replayed(steps: list[list[np.ndarray]], slots: int) -> float | None:
    """The same of the replay baseline's cache; None if a step needs more rows than there are slots."""
    cache, missed = Residency(LAYERS * EXPERTS, slots), []
    for step in steps:
        rows = np.concatenate(step)
        missing = rows[cache.slot_of[rows] < 0]
        cache.begin()
        try:
            cache.place(missing, rows[cache.slot_of[rows] >= 0])
        except ValueError:
            return None
        cache.touch(rows)
        missed.append(len(missing))
    return float(np.mean(missed[len(missed) // 2 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    ids = routing.trace(options.steps, LAYERS, options.tokens, EXPERTS, TOP_K)
    print(routing.locality(ids, EXPERTS))
    steps = layer_rows(ids)
    print("coverage", "replay", *[f"{share:.4g} of the slots" for share in SHARES], sep=" | ")
    for coverage in COVERAGES:
        slots = int(LAYERS * EXPERTS * coverage)
        baseline = replayed(steps, slots)
        found = [f"{paged(steps, slots, max(8, int(share * slots))):.1f}" for share in SHARES]
        print(f"{coverage:.0%}", "-" if baseline is None else f"{baseline:.1f}", *found, sep=" | ")


if __name__ == "__main__":
    main()
