"""Results as SVG pictures. The same results give the same bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

Results = Sequence[tuple[str, dict[str, Any]]]
STYLE = {"svg.hashsalt": "moet", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
LEAST = 1e-13
"""Where a KL of 0 is drawn, on an axis that is logarithmic."""


def draw(results: Results, folder: Path) -> list[Path]:
    """kl.svg, domains.svg, partings.svg, tasks.svg: those that the results have something for. Returns what was written."""
    compared = [(name, r) for name, r in results if r["kind"] == "compare"]
    tasks = [(name, r) for name, r in results if r["kind"] == "tasks"]
    wanted = {
        "kl": (_kl, compared),
        "domains": (_domains, [(n, r) for n, r in compared if any("domains" in s for s in r["paths"].values())]),
        "partings": (_partings, [(n, r) for n, r in compared if r.get("answers")]),
        "tasks": (_tasks, tasks),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, (picture, found) in wanted.items():
            if found:
                figure = picture(found)
                path = folder / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
                plt.close(figure)
                written.append(path)
    return written


def _kl(results: Results) -> Figure:
    """A dot a path with its interval; the noise floor as a grey mark."""
    rows = [(f"{name}\n{path}", s) for name, r in results for path, s in r["paths"].items()]
    figure, axes = plt.subplots(figsize=(6, 0.6 + 0.45 * len(rows)))
    for y, (_, s) in enumerate(rows):
        kl = s["kl"]
        _dot(axes, y, max(LEAST, kl["value"]), kl["low"] and max(LEAST, kl["low"]), kl["high"] and max(LEAST, kl["high"]))
        if s.get("floor_kl") is not None:
            axes.plot(max(LEAST, s["floor_kl"]), y, "|", color="0.5", markersize=14)
    axes.set(xscale="log", xlabel=f"KL from the reference, nats a token (0 at {LEAST:g}); grey: noise floor", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    return figure


def _domains(results: Results) -> Figure:
    """KL of the first path of each result, by domain."""
    rows = []
    for name, r in results:
        path, s = next((p, s) for p, s in r["paths"].items() if "domains" in s)
        rows += [(f"{domain} ({name}, {path})", d) for domain, d in s["domains"].items()]
    figure, axes = plt.subplots(figsize=(6, 0.6 + 0.25 * len(rows)))
    for y, (_, d) in enumerate(rows):
        _dot(axes, y, d["kl"]["value"], d["kl"]["low"], d["kl"]["high"])
    axes.set(xlabel="KL from the reference, nats a token", ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    return figure


def _dot(axes: Any, y: int, value: float, low: float | None, high: float | None) -> None:
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], "-", color="C0", linewidth=1.5)
    axes.plot(value, y, "o", color="C0", markersize=5)


def _partings(results: Results) -> Figure:
    """Share of greedy answers that are still equal to the reference's after so many tokens; answers that ended equal stay."""
    figure, axes = plt.subplots(figsize=(6, 3))
    for name, r in results:
        points = [row["parting"] for row in r["samples"]["answers"]]
        steps = range(r["answers"]["max_tokens"] + 1)
        axes.step(steps, [sum(p is None or p >= n for p in points) / len(points) for n in steps], where="post", label=name)
    axes.set(xlabel="tokens", ylabel="greedy answers still equal", ylim=(0, 1.02))
    axes.legend(frameon=False)
    return figure


def _tasks(results: Results) -> Figure:
    """A group a task and metric, a bar a result, with lm-eval's standard error; shares only, perplexities have no common axis."""
    labels = list(dict.fromkeys(f"{t}\n{m}" for _, r in results for t, ms in r["tasks"].items() for m, v in ms.items() if 0 <= v["value"] <= 1))
    figure, axes = plt.subplots(figsize=(1.5 + 1.2 * max(1, len(labels)), 3))
    width = 0.8 / len(results)
    for i, (name, r) in enumerate(results):
        found = {f"{t}\n{m}": v for t, ms in r["tasks"].items() for m, v in ms.items()}
        at = [j for j, label in enumerate(labels) if label in found]
        values = [found[labels[j]] for j in at]
        axes.bar([j + i * width for j in at], [v["value"] for v in values], width, yerr=[v["stderr"] or 0 for v in values], label=name)
    axes.set_xticks([j + 0.4 - width / 2 for j in range(len(labels))], labels)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure
