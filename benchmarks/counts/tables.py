"""The tables of docs/kernel-counts.md, from docs/results/kernel_resources.json."""

import json
from pathlib import Path
from typing import Any

from counts.throughput import ARCHITECTURES, GPUS, PIPES

PATH = Path(__file__).parents[2] / "docs" / "results" / "kernel_resources.json"
FORMATS = ("tcq2", "sym2", "mxfp4", "nvfp4", "fp8", "fp8_row", "bf16")
DECODE = "mlp_small"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _loops(samples: dict[str, Any], kernel: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(format, architecture) -> the kernel's loop for the fewest tokens."""
    return {
        (e["format"], e["arch"]): min(e["kernels"][kernel]["loops"], key=lambda loop: loop["sharing"])
        for e in samples["modules"]
        if kernel in e["kernels"] and e["kernels"][kernel]["loops"]
    }


def fractions() -> str:
    """Of the bandwidth, for each format and GPU: what the busiest pipe allows over what arrives; and what is left if every turn took the longest way."""
    samples = json.loads(PATH.read_text())["samples"]
    loops, rows = _loops(samples, DECODE), []
    for format in FORMATS:
        row = [f"`{format}`"]
        for gpu in GPUS:
            if loop := loops.get((format, gpu.arch)):
                pipe, allowed = min(loop["bounds"].items(), key=lambda b: b[1])
                asked = samples["asked"][gpu.name][format]
                longest = min(allowed, ARCHITECTURES[gpu.arch].issue * loop["weights"] / (32 * loop["longest"]))
                most, least = (round(100 * min(1, a / asked)) for a in (allowed, longest))
                row.append((f"{least} to {most} %" if least < most else f"{most} %") + f" ({pipe}: {allowed:.0f} of {asked:.0f})")
            else:
                row.append("")
        rows.append(row)
    return _markdown(["rows", *(g.name for g in GPUS)], rows)


def instructions() -> str:
    """Lane instructions a weight of the decoding kernel, by pipe."""
    loops, rows = _loops(json.loads(PATH.read_text())["samples"], DECODE), []
    used = [p for p in PIPES if any(loop["instructions"].get(p) for loop in loops.values())]
    for format in FORMATS:
        for arch in ARCHITECTURES:
            if loop := loops.get((format, arch)):
                each = [32 * loop["instructions"].get(p, 0) / loop["weights"] for p in used]
                rows.append([f"`{format}` {arch}", *(f"{n:.2f}" if n else "" for n in each), f"{sum(each):.2f}", f"{32 * loop['longest'] / loop['weights']:.2f}"])
    return _markdown(["rows, architecture", *used, "all", "longest way"], rows)


def resources() -> str:
    """Registers of each kernel, the most of any format; the stack where there is one, and the formats whose loop goes there."""
    samples = json.loads(PATH.read_text())["samples"]
    found: dict[str, dict[str, list[tuple[str, dict[str, Any]]]]] = {}
    for e in samples["modules"]:
        for name, kernel in e["kernels"].items():
            found.setdefault(name, {}).setdefault(e["arch"], []).append((e["format"], kernel))

    def cell(kernels: list[tuple[str, dict[str, Any]]]) -> str:
        stack = max(k["stack"] for _, k in kernels)
        spilling = [f"`{format}`" for format, k in kernels if any("local" in loop["instructions"] for loop in k["loops"])]
        text = str(max(k["registers"] for _, k in kernels)) + (f", stack {stack} B" if stack else "")
        return text + (f"; in the loop: {', '.join(spilling)}" if spilling else "")

    rows = [[f"`{name}`", *(cell(found[name][a]) if a in found[name] else "" for a in ARCHITECTURES)] for name in sorted(found)]
    return _markdown(["kernel", *ARCHITECTURES], rows)
