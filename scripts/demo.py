"""Packs demo/model, calibrated, serves it from a quarter of its experts, in `base` and in `native`, asks both the same questions, and shows what was read from disk.

usage: python scripts/demo.py [--ram 25%] [QUESTION ...]
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import serving

PACK = ROOT / "build" / "demo-pack"
CALIBRATION_TOKENS = "16384"  # a quarter of the default: half a minute on two cores
QUESTIONS = ["What is the meaning of insomniac?", "Say something about education."]  # held out: not in the training text
MIB = 1 << 20


def ask(precision: str, ram: str, questions: list[str], logs: Path, console: Console) -> dict:
    """Starts one server, asks everything in turn, and returns answers and counters."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with console.status(f"{precision}: starting vLLM with {ram} of the experts in RAM ..."):
            running = serving.moet(PACK, "--precision", precision, "--ram", ram, log=logs / f"{precision}.log")
            server = stack.enter_context(running)
        console.print(f"{precision}: ready after {time.monotonic() - began:.0f} s at {server.url} (model {server.model})")
        answers, tokens, began = [], 0, time.monotonic()
        for question in questions:
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 80, "temperature": 0}
            reply = server.post("/v1/chat/completions", body)
            answers.append(reply["choices"][0]["message"]["content"].strip())
            tokens += reply["usage"]["completion_tokens"]
        return {"answers": answers, "speed": tokens / (time.monotonic() - began), "metrics": server.metrics()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", default="25%", help="RAM budget for experts: GiB or a percentage of their bytes")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="what to ask")
    options = parser.parse_args()
    console = Console(width=max(100, Console().width))
    logs = Path(tempfile.mkdtemp(prefix="moet-demo-"))
    PACK.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "moet", "pack", ROOT / "demo" / "model", PACK, "--calibration-tokens", CALIBRATION_TOKENS]
    subprocess.run(command, check=True)  # at once if an earlier run has done it
    results = {p: ask(p, options.ram, options.questions, logs, console) for p in ("base", "native")}

    table = Table("question", "base (2-bit experts)", "native (the checkpoint's own)", show_lines=True)
    for i, question in enumerate(options.questions):
        table.add_row(question, results["base"]["answers"][i], results["native"]["answers"][i])
    console.print(table)
    facts = Table("", "base", "native")
    facts.add_row("tokens a second", *(f"{r['speed']:.1f}" for r in results.values()))
    for name in sorted(results["base"]["metrics"]):
        if name.endswith(("_hits_total", "_misses_total", "_evictions_total")):
            facts.add_row(name, *(f"{r['metrics'].get(name, 0):,.0f}" for r in results.values()))
        elif "bytes" in name and not name.endswith("_bucket"):
            facts.add_row(f"{name} (MiB)", *(f"{r['metrics'].get(name, 0) / MIB:,.1f}" for r in results.values()))
    console.print(facts)
    console.print(f"server logs: {logs}")


if __name__ == "__main__":
    main()
