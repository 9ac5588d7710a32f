"""Hit rates of cache policies on synthetic routing traces: what docs/decisions/001-cache-policy.md rests on.

A trace is a list of (distinct rows of one layer, is a prefill). All policies get the same slots. Belady's is
the bound that knows the future.
Usage: python benchmarks/cache_policies.py [--json OUT] [--steps N]
"""

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from moet.cache.native import NativeBookkeeping

LAYERS, EXPERTS, TOP_K = 8, 64, 8
ROWS = LAYERS * EXPERTS
Trace = list[tuple[np.ndarray, bool]]


def popularity(rng: np.random.Generator, exponent: float) -> np.ndarray:
    """Per layer, logarithms of Zipf weights over the experts in a random order."""
    order = np.argsort(rng.random((LAYERS, EXPERTS)), axis=1)
    return -exponent * np.log(order + 1.0)


def trace(kind: str, steps: int, seed: int = 0) -> Trace:
    """zipf: popularity never changes. shift: it changes every 500 steps. topics: every 300 steps a new
    request of one of 6 topics, whose experts are far more skewed than the average, begins with a prefill that
    touches most experts. batch: as topics, four requests at a time."""
    rng = np.random.default_rng(seed)
    base = popularity(rng, {"zipf": 1.0, "shift": 1.0}.get(kind, 0.4))
    topics = [popularity(rng, 1.2) for _ in range(6)]
    width = 4 if kind == "batch" else 1
    current = [int(rng.integers(6)) for _ in range(width)]
    out: Trace = []
    for step in range(steps):
        if kind == "shift" and step % 500 == 0:
            base = popularity(rng, 1.0)
        if kind in ("topics", "batch") and step % (300 // width) == 0:
            current[step // (300 // width) % width] = int(rng.integers(6))
            for layer in range(LAYERS):
                out.append((layer * EXPERTS + np.flatnonzero(rng.random(EXPERTS) < 0.9), True))
        for layer in range(LAYERS):
            chosen: set[int] = set()
            for topic in current:
                weights = base[layer] + (topics[topic][layer] if kind in ("topics", "batch") else 0)
                noisy = weights + rng.gumbel(size=EXPERTS)  # the TOP_K largest are a draw without replacement
                chosen.update(np.argpartition(-noisy, TOP_K)[:TOP_K].tolist())
            out.append((layer * EXPERTS + np.array(sorted(chosen)), False))
    return out


def lru(events: Trace, slots: int) -> Iterator[tuple[int, int]]:
    held: OrderedDict[int, None] = OrderedDict()
    for rows, scan in events:
        hits = sum(r in held for r in rows.tolist())
        for r in rows.tolist():
            held[r] = None
            held.move_to_end(r)
        while len(held) > slots:
            held.popitem(last=False)
        yield hits, scan


def lfu(events: Trace, slots: int, age_every: int | None, bypass: bool) -> Iterator[tuple[int, int]]:
    """Heat halves every `age_every` touches. Each miss takes the coldest slot that its layer does not use;
    with `bypass`, a row that is colder than all
    that is held takes none (an ideal: such a row needs no memory while it is read and used)."""
    heat, held, touches = np.zeros(ROWS, np.int64), np.zeros(ROWS, bool), 0
    for rows, scan in events:
        if not scan:
            touches += len(rows)
            if age_every and touches >= age_every:
                touches, heat = 0, heat >> 1
            heat[rows] += 16
        yield int(held[rows].sum()), scan
        if scan:
            continue
        before, held[rows] = held.copy(), True
        surplus = int(held.sum()) - slots
        if surplus > 0:
            if not bypass:
                before[rows] = False
            candidates = np.flatnonzero(held if bypass else before)
            held[candidates[np.argsort(heat[candidates], kind="stable")[:surplus]]] = False


def staged(events: Trace, slots: int, **policy) -> Iterator[tuple[int, int]]:
    book = NativeBookkeeping(ROWS, slots, **policy)
    for rows, scan in events:
        yield int(book.plan(rows, scan)[:, 5].sum()), scan
    book.close()


def belady(events: Trace, slots: int) -> Iterator[tuple[int, int]]:
    """Evicts what is used again last."""
    uses: list[list[int]] = [[] for _ in range(ROWS)]
    for i, (rows, _) in enumerate(events):
        for r in rows.tolist():
            uses[r].append(i)
    position, held, next_use, order = [0] * ROWS, set(), [0] * ROWS, []
    for _, (rows, scan) in enumerate(events):
        yield sum(r in held for r in rows.tolist()), scan
        for r in rows.tolist():
            position[r] += 1
            next_use[r] = uses[r][position[r]] if position[r] < len(uses[r]) else len(events)
            held.add(r)
            heapq.heappush(order, (-next_use[r], r))
        while len(held) > slots:
            use, r = heapq.heappop(order)
            if r in held and -use == next_use[r]:
                held.remove(r)


def hit_rate(results: Iterator[tuple[int, int]], events: Trace) -> float:
    """Of decode rows, after the first fifth of the trace, in percent."""
    hits = asked = 0
    for i, ((h, scan), (rows, _)) in enumerate(zip(results, events, strict=True)):
        if not scan and i >= len(events) // 5:
            hits, asked = hits + h, asked + len(rows)
    return 100 * hits / asked


def policies(slots: int) -> dict[str, Callable[[Trace], Iterator[tuple[int, int]]]]:
    out: dict[str, Callable[[Trace], Iterator[tuple[int, int]]]] = {
        "belady": lambda e: belady(e, slots),
        "lru": lambda e: lru(e, slots),
        "lfu, no ageing, bypass": lambda e: lfu(e, slots, None, True),
        "lfu, age 4, bypass": lambda e: lfu(e, slots, 4 * ROWS, True),
        "lfu, age 4": lambda e: lfu(e, slots, 4 * ROWS, False),
        "default": lambda e: staged(e, slots),
    }
    for age in (1, 2, 4, 8, 16):
        out[f"default, age {age}"] = lambda e, a=age: staged(e, slots, age_every=a * ROWS)
    for hysteresis in (0, 16, 64):
        out[f"default, hysteresis {hysteresis}"] = lambda e, h=hysteresis: staged(e, slots, hysteresis=h)
    for staging in (1, 2, 4, 8, 16, 32):
        out[f"default, staging {staging}"] = lambda e, s=staging: staged(e, slots, staging=s)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500, help="decode steps of a trace")
    parser.add_argument("--json", help="also write the table there")
    args = parser.parse_args()
    coverages = (0.1, 0.25, 0.5)
    table: dict[str, dict[str, float]] = {}
    for kind in ("zipf", "shift", "topics", "batch"):
        events = trace(kind, args.steps)
        for coverage in coverages:
            slots = int(coverage * ROWS)
            for name, run in policies(slots).items():
                table.setdefault(name, {})[f"{kind} {coverage:.0%}"] = round(hit_rate(run(events), events), 2)
    columns = list(next(iter(table.values())))
    print(f"{'':28s}" + "".join(f"{c:>12s}" for c in columns))
    for name, row in table.items():
        print(f"{name:28s}" + "".join(f"{row[c]:12.1f}" for c in columns))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(
                {
                    "layers": LAYERS,
                    "experts": EXPERTS,
                    "top_k": TOP_K,
                    "steps": args.steps,
                    "hit_rate_percent": table,
                },
                f,
                indent=1,
            )


if __name__ == "__main__":
    main()
