"""`moet cache list | prune | clean`: the packs that `moet serve` made."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moet.engine import packcache
from moet.engine.packcache import PackCache

GIB = 1 << 30
app = typer.Typer(no_args_is_help=True, help="Packs that `moet serve` made.")
Folder = Annotated[Path | None, typer.Option("--cache-dir", help="~/.cache/moet if not given")]


def opened(folder: Path | None) -> PackCache:
    return PackCache(folder or packcache.default_dir())


@app.command("list")
def show(cache_dir: Folder = None, as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """All packs, least recently used first."""
    cache = opened(cache_dir)
    entries = cache.entries()
    if as_json:
        print(json.dumps([{"name": e.name, "path": str(e.path), "bytes": e.bytes, "used": e.used, "state": e.state} for e in entries], indent=1))
        return
    table = Table("pack", "GiB", "last used", "state", box=None)
    for e in entries:
        table.add_row(e.name, f"{e.bytes / GIB:.2f}", time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used)), e.state)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(f"{cache.root}: {len(entries)} packs, {sum(e.bytes for e in entries) / GIB:.2f} GiB", markup=False)


@app.command()
def prune(
    max_gib: Annotated[float, typer.Option("--max-gib", help="what may stay, in GiB", min=0, max=1 << 20)],
    cache_dir: Folder = None,
) -> None:
    """Removes the least recently used packs until the rest takes at most --max-gib. Packs in use stay."""
    cache = opened(cache_dir)
    report(cache.prune(int(max_gib * GIB)))
    left = sum(e.bytes for e in cache.entries())
    if left > max_gib * GIB:
        Console(stderr=True, highlight=False).print(f"moet: {left / GIB:.2f} GiB are in use and stay")


@app.command()
def clean(cache_dir: Folder = None) -> None:
    """Removes every pack that is not in use."""
    report(opened(cache_dir).prune(-1))


def report(removed: list[packcache.Entry]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for e in removed:
        console.print(f"removed {e.name} ({e.bytes / GIB:.2f} GiB)", markup=False)
    console.print(f"{len(removed)} packs removed, {sum(e.bytes for e in removed) / GIB:.2f} GiB freed")
