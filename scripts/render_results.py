"""Renders the tables that docs/results/*.json hold into the pages that show them, between markers. `--check` only says whether they are up to date."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from counts import tables as count_tables

RESULTS = ROOT / "docs" / "results"
HEADLINES = ("A2", "A4", "F1", "F2a", "F2b", "F2c", "F3", "M1a", "M1b", "M2a", "N1a", "T1a", "T2a")
"""Claims that README shows; docs/results.md has them all."""
GPU_HEADLINES = ("G1", "G2", "G3", "G4", "G5", "K1", "K2", "K3", "K4", "K5")
"""Groups of claims of which README shows the one that is furthest from holding, once they were measured (G2 has one for each coverage, routing and batch)."""


def number(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.3g}"


def claims() -> list[dict]:
    """All claims with the file they came from, sorted by id (letters, then number)."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        rows += [{**claim, "file": path.name, "mode": result.get("mode", "")} for claim in result["claims"]]
    return sorted(rows, key=rank)


def rank(c: dict) -> tuple:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", c["id"])], c["file"] != "cpu_moe.json"


def claim_table(rows: list[dict], folder: str) -> str:
    lines = ["| claim | what was measured | value | target | holds |", "| --- | --- | --: | --: | :-: |"]
    for c in rows:
        target = "" if c["target"] is None else f"{c.get('sense', '>=')} {number(c['target'])}"
        holds = {True: "yes", False: "**no**", None: ""}[c["held"]]
        lines.append(f"| [{c['id']}]({folder}{c['file']}) | {c['what']} | {number(c['value'])} {c['unit']} | {target} | {holds} |")
    return "\n".join(lines)


def worst(rows: list[dict]) -> dict:
    """Of claims with a target, the one that is furthest from holding, relative to its target; it says of how many."""
    margin = {
        ">=": lambda c: c["value"] / c["target"],
        "<=": lambda c: c["target"] / c["value"] if c["value"] else math.inf,
        "==": lambda c: math.inf if c["held"] else -math.inf,
    }
    found = min(rows, key=lambda c: margin[c["sense"]](c))
    return found if len(rows) == 1 else {**found, "what": f"{found['what']} (worst of {len(rows)})"}


def headlines() -> str:
    rows = claims()
    chosen = [c for c in rows if c["id"] in HEADLINES]
    for group in GPU_HEADLINES:
        members = [c for c in rows if c["id"].split(".")[0] == group and c["target"] is not None]
        chosen += [worst(members)] if members else []
    return claim_table(sorted(chosen, key=rank), "docs/results/")


def everything() -> str:
    return claim_table(claims(), "results/")


def gpu_steps() -> str:
    """One row for each configuration that gpu_scale.json timed; nothing before there is one."""
    path = RESULTS / "gpu_scale.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    head = ["routing, tokens, coverage", "step", "tokens/s", "missed rows", "moved", "while fetching", "of the fetch hidden", "step / bound", "replayed step", "graph runs"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --: |" * (len(head) - 1)]
    for name, r in result["steps"].items():
        replayed = result.get("replay", {}).get(name, {})
        cell = lambda value, form: "" if value is None else form.format(value)
        cells = [
            name, f"{r['median_ms']:.2f} ms", f"{r['tok_per_s_back_to_back']:,.0f}", cell(r.get("missed_rows"), "{:.1f}"), cell(r.get("missed_mb"), "{:.0f} MB"),
            cell(r.get("fetch_gb_per_s"), "{:.1f} GB/s"), "" if r.get("hidden") is None else f"{100 * r['hidden']:.0f} %",
            cell(r.get("over_bound") if r.get("missed_rows") else None, "{:.3f}"), cell(replayed.get("step_ms"), "{:.2f} ms"), cell(replayed.get("runs"), "{:.2f}"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def nvme_steps() -> str:
    """The steps that gpu_nvme.json timed: rows behind a disk, and the same with all of them in RAM."""
    path = RESULTS / "gpu_nvme.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    lines = ["| 30 layers, one token, 15 % of the rows in slots | mean step | tokens/s | missed rows | of them from disk |", "| --- |" + " --: |" * 4]
    for name, r in result["steps"].items():
        lines.append(f"| {name} | {r['mean_ms']:.1f} ms | {r['tok_per_s_back_to_back']:,.0f} | {r['missed_rows']:.1f} | {r['disk_mb']:.0f} MB |")
    return "\n".join(lines)


GEMM_COLUMNS = (
    ("tcq2", "ours tcq2"), ("sym2", "ours sym2"), ("humming_uint2", "Humming uint2"), ("mxfp4", "ours mxfp4"), ("nvfp4", "ours nvfp4"), ("marlin_mxfp4", "Marlin MXFP4"),
    ("marlin_nvfp4", "Marlin NVFP4"), ("humming_mxfp4", "Humming MXFP4"), ("fp8", "ours fp8"), ("triton_fp8", "Triton FP8"), ("bf16", "ours bf16"), ("triton_bf16", "Triton BF16"),
)  # fmt: skip
"""Of moe_gemm.json, and their titles."""


def gemm_table(tokens: tuple[int, ...], cell: Callable[[dict], str]) -> Callable[[], str]:
    """A row for each shape and column of moe_gemm.json that has one of these batches; nothing before there is a result."""

    def table() -> str:
        path = RESULTS / "moe_gemm.json"
        if not path.exists():
            return ""
        shapes = json.loads(path.read_text())["samples"]["cells"]
        lines = ["| tokens | | " + " | ".join(f"{t:,}" for t in tokens) + " |", "| --- | --- |" + " --: |" * len(tokens)]
        for shape, cells in shapes.items():
            for column, title in GEMM_COLUMNS:
                found = [cells.get(str(t), {}).get(column) for t in tokens]
                if any(found):
                    lines.append(f"| {shape} | {title} | " + " | ".join(cell(f) if f else "" for f in found) + " |")
        return "\n".join(lines)

    return table


def gemm_failures() -> str:
    """Columns of moe_gemm.json that did not run, or whose results were not what their own weights give."""
    path = RESULTS / "moe_gemm.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    lines = [f"- {shape}, {column}: {text}" for shape, errors in result["errors"].items() for column, text in errors.items()]
    for shape, checks in result["checks"].items():
        for column, errors in checks.items():
            wrong = {t: e for t, e in errors.items() if t != "tolerance" and not (e is not None and e <= errors["tolerance"])}
            lines += [f"- {shape}, {column}: relative errors {wrong}, expected at most {errors['tolerance']}"] if wrong else []
    return "\n".join(lines) or "Every column ran, and agreed with its reference."


def schemes(model: str, calibrations: tuple[str, ...], layers: str, texts: tuple[str, ...]) -> Callable[[], str]:
    """KL and top-1 agreement for each of `texts`."""

    def table() -> str:
        path = RESULTS / "schemes.json"
        rows: list[dict[str, Any]] = json.loads(path.read_text())["samples"]["table"] if path.exists() else []
        chosen = [r for r in rows if r["model"] == model and r["layers"] == layers and r["calibration"] in calibrations]
        chosen.sort(key=lambda r: -r["texts"][texts[0]]["kl"])
        mtp = any(r["mtp_acceptance"] is not None for r in chosen)
        head = ["scheme", "bits", "rel. RMS", "mean abs. bias", *(f"{t}: KL" for t in texts), *(f"{t}: top-1" for t in texts), f"{texts[0]}: bits/byte"]
        head += ["MTP accepted"] * mtp + ["GB/s"]
        lines = ["| " + " | ".join(head) + " |", "| --- |" + " --: |" * (len(head) - 1)]
        for r in chosen:
            t = r["texts"]
            cells = [f"`{r['scheme']}`", f"{r['bits']:.2f}", f"{r['relative_rms']:.3f}", f"{r['mean_absolute_bias']:.4f}"]
            cells += [f"{t[x]['kl']:.3f}" for x in texts] + [f"{100 * t[x]['top1']:.1f} %" for x in texts] + [f"{t[texts[0]]['bits_per_byte']:.3f}"]
            cells += [f"{100 * r['mtp_acceptance']:.1f} %" if r["mtp_acceptance"] is not None else ""] if mtp else []
            cells += [f"{r['encode_gb_per_s']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    return table


GEMM_DECODE = gemm_table((1, 2, 4, 8, 16, 64), lambda c: f"{c['us']:.0f} ({100 * c['fraction']:.0f} %)")
GEMM_PREFILL = gemm_table((256, 1024, 4096), lambda c: f"{c['tflops']:.0f} ({100 * c['fraction']:.0f} %)")

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"results": headlines},
    "docs/results.md": {"results": everything, "gpu steps": gpu_steps, "nvme steps": nvme_steps, "gemm decode": GEMM_DECODE, "gemm prefill": GEMM_PREFILL, "gemm failures": gemm_failures},
    "docs/kernel-counts.md": {"fractions": count_tables.fractions, "instructions": count_tables.instructions, "resources": count_tables.resources},
    "docs/schemes.md": {
        "demo": schemes("demo", ("", "default"), "all", ("text", "chat")),
        "demo, own text": schemes("demo", ("own",), "all", ("text", "chat")),
        "smollm2": schemes("smollm2", ("", "default"), "all", ("documentation", "programs", "mixture")),
        "smollm2, own text": schemes("smollm2", ("own",), "all", ("documentation", "programs", "mixture")),
        "smollm2, every sixth layer": schemes("smollm2", ("", "default"), "sixth", ("documentation", "programs", "mixture")),
    },
}
"""Page -> name of its markers -> what stands between them."""


def render(page: str, text: str) -> str:
    """The page with all its tables made anew. Raises ValueError if a marker is missing."""
    for name, table in TABLES[page].items():
        begin, end = f"<!-- {name}: begin (rendered from docs/results) -->", f"<!-- {name}: end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is not what docs/results says")
    check = parser.parse_args().check
    for page in TABLES:
        old = (ROOT / page).read_text()
        new = render(page, old)
        if check and new != old:
            sys.exit(f"{page}: its tables differ from docs/results; run python scripts/render_results.py")
        if not check:
            (ROOT / page).write_text(new)


if __name__ == "__main__":
    main()
