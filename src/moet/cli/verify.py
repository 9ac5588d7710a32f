"""`moet verify PACK`: every byte; with --repair SRC, what is bad is made again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moet.cli.pack import BarProgress, open_source
from moet.pack.faults import Fault


def verify(
    pack: Annotated[Path, typer.Argument(help="pack folder")],
    repair: Annotated[
        str | None,
        typer.Option(
            metavar="SRC", help="mend from the checkpoint that the pack was made from: folder or Hub id"
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="files and rows in work at a time; 0: one a core", min=0)] = 0,
    wait: Annotated[
        float,
        typer.Option(
            help="seconds without any progress of SRC's download before a missing shard is an error", min=0
        ),
    ] = 120.0,
    json_report: Annotated[
        bool, typer.Option("--json", help="print what was found as JSON on standard output")
    ] = False,
) -> None:
    """Checks every byte of a pack. Leaves with 1 if anything is wrong and was not repaired."""
    from moet.pack.repair import repair as mend
    from moet.pack.verify import verify as check

    rewritten: tuple[str, ...] = ()
    left: tuple[Fault, ...] = ()
    way = ""
    with BarProgress(Console(stderr=True, soft_wrap=True)) as progress:
        if repair is None:
            verdict = check(pack, workers=workers or None, progress=progress)
        else:
            source = open_source(repair, pack, consume=False, wait=wait, revision=None, progress=progress)
            outcome = mend(pack, source, workers=workers or None, progress=progress)
            verdict, rewritten, left, way = outcome.before, outcome.rewritten, outcome.left, outcome.way
    good = verdict.ok or (bool(rewritten) and not left)
    if json_report:
        found = {
            "pack": str(pack),
            "ok": good,
            "faults": [asdict(f) for f in verdict.faults],
            "warnings": verdict.warnings,
        }
        print(
            json.dumps(
                found
                | {"rewritten": rewritten, "left": [asdict(f) for f in left], "bytes": verdict.bytes, "seconds": round(verdict.seconds, 3)},
                indent=1,
            )
        )
    else:
        out = Console(soft_wrap=True, highlight=False, markup=False)
        for fault in verdict.faults:
            out.print(f"bad: {fault}")
        for name in verdict.warnings:
            out.print(f"not part of the pack: {name}")
        for name in rewritten:
            out.print(f"rewritten: {name}")
        for fault in left:
            out.print(f"not repaired: {fault}")
        if way:
            out.print(way)
        gb = verdict.bytes / 1e9
        rate = f"{gb:.2f} GB in {verdict.seconds:.1f} s ({gb / max(verdict.seconds, 1e-9):.2f} GB/s)"
        state = "every byte is right" if verdict.ok else f"{len(verdict.faults)} faults"
        repaired = f", {len(left)} of them left" if left else ", repaired" if rewritten else ""
        out.print(f"{pack}: {state}{repaired}; {rate}")
    if not good:
        raise typer.Exit(1)
