"""Results as tables: for a terminal, or in Markdown. Nothing is computed here that the result file does not hold, but the pairing of two tasks results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

Results = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Table:
    """notes: sentences below it. numbers: all columns but the first are flush right."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    numbers: bool = True


def tables(results: Results) -> list[Table]:
    found: list[Table] = []
    for name, r in results:
        found += _compare(name, r) if r["kind"] == "compare" else _tasks(name, r)
    scored = [(name, r) for name, r in results if r["kind"] == "tasks"]
    if len(scored) == 2:
        from moet.eval.pairs import paired

        found.append(paired(*scored))
    return found


def _compare(name: str, r: dict[str, Any]) -> list[Table]:
    columns = ("path", "windows", "tokens", "KL, nats (95 %)", "noise floor", "same top-1", "bits/byte", "more than the reference (95 %)", "perplexity")
    rows = [(path, *_row(s)) for path, s in r["paths"].items()]
    notes = [f"{path}: {s['measured']}; vocabulary: {s['vocabulary']}; intervals over {s['units']} {s['unit']}s" for path, s in r["paths"].items()]
    notes += [f"{path}: the difference is noise" for path, s in r["paths"].items() if s.get("at_noise_floor")]
    notes += [f"sameness: {fact}" for fact in r["sameness"]] + r["power"]
    found = [Table(f"{name}: {_subject(r['candidate'])} against {_subject(r['reference'])}", columns, rows, tuple(notes))]
    kept = [0, 1, 2, 4, 6]  # a row has all of the above but the path
    domains = [(path, domain, *(_row(d)[i] for i in kept)) for path, s in r["paths"].items() for domain, d in s.get("domains", {}).items()]
    if domains:
        found.append(Table(f"{name}: by domain", ("path", "domain", *(columns[i + 1] for i in kept)), domains))
    if r.get("answers"):
        found.append(_answers(name, r["answers"]))
    return found


def _row(d: dict[str, Any]) -> tuple[str, ...]:
    bits, more, nats = d.get("bits_per_byte"), d.get("bits_per_byte_difference"), d["perplexity"]
    return (
        str(d["windows"]), f"{d['tokens']:,}", f"{_number(d['kl']['value'])} ({_interval(d['kl'])})", _number(d.get("floor_kl")), _share(d["agreement"]["value"]),
        f"{bits['candidate']:.4f}" if bits else "", f"{more['value']:+.4f} ({_interval(more, '+.4f')})" if more else "", f"{nats['candidate']:.2f} / {nats['reference']:.2f}",
    )  # fmt: skip


def _answers(name: str, a: dict[str, Any]) -> Table:
    d, n, rows = a["divergence"], a["length"], []
    rows.append(("greedy answers that are equal", f"{d['equal']} of {d['of']}"))
    rows.append(("greedy answers part, median", "never, for most" if d["median"] is None else f"at token {d['median']}"))
    if d["per_token"] is not None:
        rows.append(("partings a token", f"{d['per_token']:.4f}"))
    if "inflation" in n:
        rows.append(("length of answers, candidate / reference", f"{n['inflation']['value']:.3f} ({_interval(n['inflation'])}), signed-rank p {n['signed_rank_p']:.3g}; {n['power']}"))
    if n["cut_off_on_both_sides"]:
        rows.append(("answers cut off on both sides", str(n["cut_off_on_both_sides"])))
    if v := a.get("validity"):
        m = v["mcnemar"]
        rows.append(("valid JSON and tool calls", f"{_share(v['candidate'])}, reference {_share(v['reference'])}; {m['lost']} lost, {m['won']} won, McNemar p {m['p']:.3g}"))
    if "not_judged" in a:
        rows.append(("not judged", a["not_judged"]))
    for side, m in (a.get("mtp") or {}).items():
        if m:
            rows.append((f"MTP drafts accepted, {side}", f"{_share(m['acceptance']['value'])} ({_interval(m['acceptance'])}), {m['tokens_per_step']:.3f} tokens a step"))
    return Table(f"{name}: answers to {a['prompts']} prompts, greedy, at most {a['max_tokens']} tokens", ("", "found"), rows, numbers=False)


def _tasks(name: str, r: dict[str, Any]) -> list[Table]:
    rows = [
        (task, metric, str(m["documents"]), f"{m['value']:.4f}", "" if m["stderr"] is None else f"{m['stderr']:.4f}")
        for task, metrics in r["tasks"].items()
        for metric, m in metrics.items()
    ]
    return [Table(f"{name}: {_subject(r['candidate'])}", ("task", "metric", "documents", "value", "standard error"), rows, tuple(r["power"]))]


def _subject(card: dict[str, Any]) -> str:
    print_ = f", {card['fingerprint'][:12]}" if card["fingerprint"] else ""
    return f"{card['name']} ({card['mode']}{print_})"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.4f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(i: dict[str, Any], form: str = "") -> str:
    if i["low"] is None or i["high"] is None:
        return "unknown"
    return " to ".join(format(x, form) if form else _number(x) for x in (i["low"], i["high"]))


def show(results: Results, console: Console) -> None:
    """A stream that is no terminal gets lines as long as the tables are."""
    if not console.is_terminal:
        console.width = 200
    for table in tables(results):
        drawn = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(table.columns):
            drawn.add_column(column, justify="right" if i and table.numbers else "left")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn, markup=False, highlight=False)
        for note in table.notes:
            console.print(f"- {note}", markup=False, highlight=False)
        console.print()


def markdown(results: Results) -> str:
    lines = []
    for table in tables(results):
        lines += [f"### {table.title}", "", _cells(table.columns), _cells(["--:" if i and table.numbers else "---" for i in range(len(table.columns))])]
        lines += [_cells(row) for row in table.rows] + [""]
        lines += [f"- {note}" for note in table.notes] + ([""] if table.notes else [])
    return "\n".join(lines)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
