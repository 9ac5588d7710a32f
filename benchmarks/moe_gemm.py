"""One routed-expert layer, ours and what people would use instead, on one GPU, on the same inputs: microseconds, TFLOP/s, and the share of what the GPU's memory or
arithmetic would allow, both measured in the same run. Claims K1 to K5.

    python benchmarks/moe_gemm.py --out FOLDER [--shapes v4-flash,glm-5.2] [--tokens 1,8,256] [--columns tcq2,marlin_mxfp4] [--seconds 240] [--resume FOLDER/moe_gemm.json]

Columns of others need vLLM 0.33 (and humming-kernels); those that do not run are named in the result, with the reason. What there is is written after every column.
--resume: cells, errors and checks that a result holds are kept, and only what it lacks is run. benchmarks/gemm/README.md says how it is measured.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "gpu")]

import torch
from gemm import ahead, ceilings, claims, counts
from gemm.bounds import Ceilings
from gemm.columns import KINDS
from gemm.shapes import SHAPES, TOKENS
from gemm.table import ContextLost, Table, describe, kinds_for
from gemm.timing import SAMPLES
from report import Report

DEVICE = "cuda:0"
MODE = "2-bit and native rows, bf16 activations"


def names(known: Sequence[str], text: str) -> list[str]:
    """Of a list with commas; raises ArgumentTypeError for one that is not known."""
    found = [n for n in text.split(",") if n]
    if wrong := [n for n in found if n not in known]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, found {', '.join(wrong)}")
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of moe_gemm.json")
    parser.add_argument("--seconds", type=float, default=240, help="stop cleanly after so long; parts that do not fit are named in the result")
    parser.add_argument("--shapes", type=lambda t: names(list(SHAPES), t), default=list(SHAPES))
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=list(TOKENS))
    parser.add_argument("--columns", type=lambda t: names(list(KINDS), t), default=[], help="default: all for the shapes of the claims, ours and one of the others for the rest")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="replays of a cell")
    parser.add_argument("--resume", type=Path, help="an earlier result")
    parser.add_argument("--anew", type=lambda t: names(list(KINDS), t), default=[], help="columns of which --resume keeps nothing")
    parser.add_argument("--commit", default="", help="of the sources, where there is no git to ask")
    return parser.parse_args()


def described(found: Ceilings, samples: dict[str, object]) -> dict[str, object]:
    return {"read_gb_per_s": found.read / 1e9, "copy_gb_per_s": found.copy / 1e9, "bf16_tflops": found.flops / 1e12, "samples": samples}


def ceilings_of(facts: dict[str, Any]) -> Ceilings:
    return Ceilings(facts["read_gb_per_s"] * 1e9, facts["copy_gb_per_s"] * 1e9, facts["bf16_tflops"] * 1e12)


def facts_of(table: Table) -> dict[str, Any]:
    """What a result holds beside claims and cells."""
    return {
        "shapes": {s.name: {"hidden": s.hidden, "inter": s.inter, "experts": s.experts, "top_k": s.top_k, "routing": s.routing} for s in SHAPES.values()},
        "errors": table.errors, "checks": table.checks, "notes": table.notes, "counts": counts.table(),
    }  # fmt: skip


def again(o: argparse.Namespace, report: Report) -> None:
    """This program once more, in a new process image, for what is not done yet."""
    out = str(o.out / "moe_gemm.json")
    more = ["--resume", out, "--seconds", f"{report.left:.0f}", "--commit", o.commit]
    lists = ["--shapes", ",".join(o.shapes), "--tokens", ",".join(map(str, o.tokens)), "--columns", ",".join(o.columns), "--samples", str(o.samples)]
    os.execv(sys.executable, [sys.executable, __file__, "--out", str(o.out), *lists, *more])


def compile_kernels(o: argparse.Namespace, report: Report) -> None:
    """Of ours now; of Humming, which takes a minute, beside the columns before it."""
    kinds = {k.name: k for name in o.shapes for k in kinds_for(SHAPES[name], o.columns)}
    if formats := [k.format for k in kinds.values() if k.ours]:
        try:
            with report.timed("our kernels"):
                ahead.ours(formats)
        except Exception as error:   # noqa: BLE001 (the columns say it too)
            report.say(describe(error))
    with_humming = [name for name in o.shapes if any(k.module == "humming" for k in kinds_for(SHAPES[name], o.columns))]
    if with_humming and importlib.util.find_spec("humming"):
        ahead.start_humming(with_humming, o.tokens, o.out / "humming.log")


def main() -> None:
    o = options()
    o.out.mkdir(parents=True, exist_ok=True)
    report = Report(o.out / "moe_gemm.json", MODE, o.seconds, o.commit)
    compile_kernels(o, report)
    device = torch.device(DEVICE)
    earlier = json.loads(o.resume.read_text()) if o.resume else None
    if earlier:
        report.facts["ceilings"] = earlier["ceilings"]   # all fractions are of the same ones
    else:
        with report.timed("ceilings"):
            report.facts["ceilings"] = described(*ceilings.measure(device))
    report.say(report.facts["ceilings"])

    def save() -> None:
        report.claims, report.samples = claims.claims(table.cells, table.checks), {"cells": table.cells}
        report.facts |= facts_of(table)
        report.write()

    table = Table(ceilings_of(report.facts["ceilings"]), device, report.fits, report.say, save)
    if earlier:
        table.cells = earlier["samples"]["cells"]
        table.errors, table.checks, table.notes = (earlier[name] for name in ("errors", "checks", "notes"))
        for column in o.anew:
            table.forget(column)
    for name in o.shapes:
        shape = SHAPES[name]
        try:
            with report.timed(name):
                table.run(shape, o.tokens, kinds_for(shape, o.columns), o.samples)
        except ContextLost as error:
            report.say(error)
            again(o, report)
    save()
    report.finish()


if __name__ == "__main__":
    main()
