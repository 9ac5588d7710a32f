"""Claims K1 to K5 from the table's cells. A column whose check failed takes no part in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from record import Claim

from gemm.columns import KINDS

Cells = Mapping[str, Mapping[str, Any]]
"""tokens -> column -> cell, of one shape."""
K_SHAPES = ("v4-flash", "glm-5.2", "kimi-k2.7")
TWO_BIT = ("tcq2", "sym2")
FP4_RIVALS = tuple(k.name for k in KINDS.values() if k.group == "fp4" and not k.ours)


def valid(checks: Mapping[str, float | None]) -> bool:
    """Whether all errors against the reference are there and within the tolerance."""
    errors = [v for name, v in checks.items() if name != "tolerance"]
    return bool(errors) and all(e is not None and e <= checks["tolerance"] for e in errors)


def usable(cells: Cells, checks: Mapping[str, Mapping[str, float | None]]) -> Cells:
    return {t: {c: cell for c, cell in row.items() if valid(checks.get(c, {}))} for t, row in cells.items()}


def fastest(row: Mapping[str, Any], names: Iterable[str]) -> tuple[str, float] | None:
    """Column and microseconds of the fastest of `names` that was timed."""
    found = [(row[n]["us"], n) for n in names if n in row]
    return (min(found)[1], min(found)[0]) if found else None


def worst_over(cells: Cells, tokens: Sequence[int], value: Callable[[Mapping[str, Any]], tuple[float, str] | None]) -> tuple[float, str] | None:
    """The smallest value over batches, with a word on where; None if none of them has one."""
    found = []
    for t in tokens:
        here = value(cells.get(str(t), {}))
        if here is not None:
            found.append((here[0], f"x{t}{here[1]}"))
    return min(found) if found else None


def speedup(ours: str, rivals: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[float, str] | None]:
    def value(row: Mapping[str, Any]) -> tuple[float, str] | None:
        best = fastest(row, rivals)
        return None if best is None or ours not in row else (best[1] / row[ours]["us"], f" against {best[0]}")

    return value


def of_bound(column: str) -> Callable[[Mapping[str, Any]], tuple[float, str] | None]:
    """Bound / (w13 + w2 + combine), what begins a layer left out."""
    return lambda row: (row[column]["gemm_fraction"], "") if column in row else None


def claims(table: Mapping[str, Cells], checks: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[Claim]:
    """One for each shape of K_SHAPES and each of our formats that it is about; the value is the worst batch's."""
    out: list[Claim] = []

    def add(id: str, shape: str, ours: str, tokens: Sequence[int], value: Callable, what: str, target: float) -> None:
        cells = usable(table.get(shape, {}), checks.get(shape, {}))
        if (found := worst_over(cells, tokens, value)) is not None:
            out.append(Claim(f"{id}.{shape}.{ours}", f"{shape}, {ours}: {what}; worst at {found[1]}", round(found[0], 3), "" if id == "K1" else "x", target))

    for shape in K_SHAPES:
        for ours in TWO_BIT:
            add("K1", shape, ours, (2, 4, 8), of_bound(ours), "bytes of the experts / read bandwidth, over the time of w13, w2 and combine, 2 to 8 tokens", 0.8)
            add("K2", shape, ours, (2, 4, 8, 16), speedup(ours, FP4_RIVALS), "speed against vLLM's fastest FP4 of the batch, 2 to 16 tokens", 2.2)
            add("K3", shape, ours, (1, 2, 4, 8, 16, 64), speedup(ours, ("humming_uint2",)), "speed against Humming uint2, 1 to 64 tokens", 1.2)
            add("K3b", shape, ours, (256, 1024, 4096), speedup(ours, ("humming_uint2",)), "speed against Humming uint2, from 256 tokens", 1.2)
            add("K4", shape, ours, (256, 1024, 4096), speedup(ours, ("triton_fp8",)), "speed against vLLM's FP8 fused MoE, from 256 tokens", 1.2)
        for ours in ("mxfp4", "nvfp4"):
            add("K5", shape, ours, (1, 2, 4, 8, 16), speedup(ours, FP4_RIVALS), "speed against vLLM's fastest FP4 of the batch, 1 to 16 tokens", 1.3)
    return out
