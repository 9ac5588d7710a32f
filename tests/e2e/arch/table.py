"""docs/results/architectures.json to docs/architectures.md."""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS = DOCS / "results" / "architectures.json"
PAGE = DOCS / "architectures.md"

HEAD = """\
# Architectures

Every architecture and format, end to end: a checkpoint in the publisher's layout is packed and verified, and every matrix of
every expert is compared with values that moet did not compute. Where vLLM's CPU backend runs the model, the pack is also served,
{ram} % of the experts' bytes in RAM and the rest on disk, and compared with transformers in float32.

The checkpoints are small ({experts} experts in all) and random, from `tests/generators` (layouts and numbers written without
moet's code) or exported by nvidia-modelopt and llmcompressor (`tests/fixtures`).

- **rows**: native rows equal the checkpoint's values, base rows equal an independent quantization; both bit for bit in float64,
  signs of zeros included. The number is that of compared matrices.
- **native**, **base**: vLLM with moet against transformers on the dequantized checkpoint, and with the base rows' values in place of
  the experts. Teacher-forced: tokens that are transformers' first choice, and the largest difference of a log-probability.
  It holds up to {tolerance}, and up to {fp8} for the rows with FP8 activations: there vLLM rounds the inputs of the linear layers
  outside the experts to E4M3, the reference does the same, and a sum in another order can round to the neighbour. Experts take
  activations as they are.
- Fixtures have so few experts that all of them stay in RAM.
- MiniMax-M2: vLLM 0.32's CPU router asserts softmax where there are no expert groups; this program fills that case in, with
  vLLM's own function for one group. Nothing else of vLLM is touched.

"""


def render(results: dict) -> str:
    """The whole page."""
    rows, notes = results["samples"]["rows"], []
    out = [
        HEAD.format(
            ram=results["ram_percent"],
            experts=sum(r["experts"] for r in rows),
            tolerance=f"{results['tolerance']:g}",
            fp8=f"{results['tolerance_fp8']:g}",
        )
    ]
    out.append(
        "| model | format | made by | rows | base error | native | base |\n| --- | --- | --- | ---: | ---: | --- | --- |\n"
    )
    for row in rows:
        equal = (
            f"{row['matrices']} equal"
            if not row["wrong"]
            else f"**{row['wrong']} of {row['matrices']} differ**"
        )
        served = (
            [_served(row["served"][p]) for p in ("native", "base")]
            if row["served"]
            else [_note(row["not_served"], notes)] * 2
        )
        cells = [row["model"], row["format"], row["made_by"], equal, f"{row['base_error']:.3f}", *served]
        out.append(f"| {' | '.join(cells)} |\n")
    out.append(
        "\nbase error: sum of (q - v)² over sum of v². On normal random weights; real ones differ.\n\nNot served here:\n\n"
    )
    out += [f"{i}. {note}.\n" for i, note in enumerate(notes, 1)]
    out.append("\n## Claims\n\n| id | what | value | target | held |\n| --- | --- | ---: | ---: | --- |\n")
    for c in results["claims"]:
        held = "yes" if c["held"] else "**no**"
        out.append(
            f"| {c['id']} | {c['what']} | {c['value']:g} {c['unit']} | {c['sense']} {c['target']:g} | {held} |\n"
        )
    machine, versions = (
        results["machine"],
        ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    )
    out.append(
        f"\n{results['date']}, commit {results['commit']}, {machine['cpu']}, {machine['cores']} cores; {versions}. "
        "Made by `scripts/architectures.py` from `docs/results/architectures.json`.\n"
    )
    return "".join(out)


def _served(agreement: dict) -> str:
    text = f"{agreement['same']}/{agreement['tokens']}, {agreement['logprob']:.1e}"
    return text if agreement["held"] else f"**{text}**"


def _note(reason: str, notes: list[str]) -> str:
    if reason not in notes:
        notes.append(reason)
    return f"no ({notes.index(reason) + 1})"
