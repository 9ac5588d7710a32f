"""Renders the tables that docs/results/*.json hold into the pages that show them, between markers. `--check` only says whether they are up to date."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
HEADLINES = ("A2", "A4", "B2", "F1", "F1b", "F2a", "F2b", "F2c", "F3", "M1a", "M1b", "M2a", "M2b", "M3", "M4", "N1a", "T1a", "T2a")
"""Claims that README shows; docs/results.md has them all."""


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
    return sorted(rows, key=lambda c: ([int(part) if part.isdigit() else part for part in re.split(r"(\d+)", c["id"])], c["file"] != "cpu_moe.json"))


def claim_table(rows: list[dict], folder: str) -> str:
    lines = ["| claim | what was measured | value | target | holds |", "| --- | --- | --: | --: | :-: |"]
    for c in rows:
        target = "" if c["target"] is None else f"{c.get('sense', '>=')} {number(c['target'])}"
        holds = {True: "yes", False: "**no**", None: ""}[c["held"]]
        lines.append(f"| [{c['id']}]({folder}{c['file']}) | {c['what']} | {number(c['value'])} {c['unit']} | {target} | {holds} |")
    return "\n".join(lines)


def headlines() -> str:
    return claim_table([c for c in claims() if c["id"] in HEADLINES], "docs/results/")


def everything() -> str:
    return claim_table(claims(), "results/")


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


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"results": headlines},
    "docs/results.md": {"results": everything},
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
