"""Renders README's results table from docs/results/*.json, between its two markers. `--check` only says whether it is up to date."""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- results: begin (rendered from docs/results) -->", "<!-- results: end -->"


def number(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.3g}"


def claims() -> list[dict]:
    """All claims with the file they came from, sorted by id (letters, then number)."""
    rows = []
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        rows += [{**claim, "file": path.name, "mode": result.get("mode", "")} for claim in result["claims"]]
    return sorted(rows, key=lambda c: ([int(part) if part.isdigit() else part for part in re.split(r"(\d+)", c["id"])], c["file"] != "cpu_moe.json"))


def table() -> str:
    lines = ["| claim | what was measured | value | target | holds |", "| --- | --- | --: | --: | :-: |"]
    for c in claims():
        target = "" if c["target"] is None else f"{c.get('sense', '>=')} {number(c['target'])}"
        holds = {True: "yes", False: "**no**", None: ""}[c["held"]]
        lines.append(
            f"| [{c['id']}](docs/results/{c['file']}) | {c['what']} | {number(c['value'])} {c['unit']} | {target} | {holds} |"
        )
    return "\n".join(lines)


def render(text: str) -> str:
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if README.md is not what docs/results says")
    check = parser.parse_args().check
    old = README.read_text()
    new = render(old)
    if check and new != old:
        sys.exit("README.md: its results table differs from docs/results; run python scripts/render_results.py")
    if not check:
        README.write_text(new)


if __name__ == "__main__":
    main()
