"""`moet pack SRC DST`: progress while it runs, a short report at the end."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from moet.calibrate import TOKENS
from moet.checkpoint import ShardSource
from moet.errors import CheckpointError, ConfigError
from moet.pack.progress import Progress
from moet.quantize.schemes import DEFAULT_SCHEME, PLAIN_SCHEME, SCHEMES
from moet.quantize.schemes import scheme as scheme_named


class BarProgress(Progress):
    """Draws a bar with rate and time left; on a stream that is no terminal, nothing but the stages' names."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            DownloadColumn(True),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
        )
        # A calibrated layer ends in bursts: the speed of half a minute, which is the default, says nothing.
        self.bar = Bar(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=900,
        )
        self.task = self.bar.add_task("opening", total=None)
        self.said = ""

    def start(self, total: int, done: int) -> None:
        self.bar.reset(self.task, total=total, completed=done)

    def advance(self, count: int) -> None:
        self.bar.advance(self.task, count)

    def stage(self, text: str) -> None:
        self.bar.update(self.task, description=text)
        if not self.console.is_terminal and text.split(";")[0] != self.said:
            self.said = text.split(";")[0]
            self.console.print(f"moet: {self.said}", markup=False, highlight=False)

    def __enter__(self) -> "BarProgress":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()


def open_source(
    src: str, dst: Path, *, consume: bool, wait: float, revision: str | None, progress: Progress
) -> ShardSource:
    """A folder, complete or growing, or a Hub id ORG/NAME. Raises CheckpointError if it is neither."""
    from moet.checkpoint.sources_remote import GrowingSource, HubSource, is_hub_id

    if src and Path(src).is_dir():
        return GrowingSource(Path(src), patience=wait, consume=consume, waiting=progress.stage)
    if is_hub_id(src):
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would write over ours
        store = dst / ".moet" / "download" if consume else None
        return HubSource(src, revision=revision, store=store, consume=consume, waiting=progress.stage)
    raise CheckpointError(
        f"{src or 'SRC'}: expected a checkpoint folder or a Hub id ORG/NAME, "
        f"found {'nothing' if not src else 'a file' if Path(src).exists() else 'neither'}"
    )


def pack(
    src: Annotated[
        str, typer.Argument(help="checkpoint folder (complete, or still being downloaded) or Hub id ORG/NAME")
    ],
    dst: Annotated[Path, typer.Argument(help="folder of the pack; an unfinished pack is continued")],
    scheme: Annotated[
        str | None, typer.Option(help=f"how the 2-bit codes are chosen: {', '.join(SCHEMES)}")
    ] = None,
    calibrate: Annotated[
        bool | None,
        typer.Option("--calibrate/--no-calibrate", help="choose codes for what each layer answers on text"),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="text to calibrate on, .txt or .jsonl, instead of moet's own; repeatable"),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="tokens to calibrate on", min=1)] = TOKENS,
    device: Annotated[str, typer.Option(help="where calibration computes: cpu, cuda, or auto")] = "auto",
    native: Annotated[
        bool, typer.Option(help="also keep the checkpoint's own experts, bit for bit, as rows")
    ] = True,
    consume: Annotated[
        bool,
        typer.Option(help="delete each shard once everything from it is on disk; a local SRC is then gone"),
    ] = False,
    workers: Annotated[int, typer.Option(help="experts in work at a time; 0: one a core", min=0)] = 0,
    wait: Annotated[
        float,
        typer.Option(
            help="seconds without any progress of a download before a missing shard is an error", min=0
        ),
    ] = 120.0,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a Hub id")] = None,
    json_report: Annotated[
        bool, typer.Option("--json", help="print the report as JSON on standard output")
    ] = False,
) -> None:
    """Makes a pack, a model folder with 2-bit experts, from a checkpoint. Stopped at any point, the same
    command goes on."""
    from moet.pack.packer import pack as run

    console = Console(stderr=True, soft_wrap=True)
    with BarProgress(console) as progress:
        source = open_source(src, dst, consume=consume, wait=wait, revision=revision, progress=progress)
        name = scheme_of(scheme, calibrate, calibration)
        encoder = None
        if name != PLAIN_SCHEME:
            progress.stage(f"{name}: what it needs")
            encoder = encoder_of(name, source.root, calibration or [], calibration_tokens, device)
        outcome = run(
            source,
            dst,
            encoder=encoder,
            native=native,
            consume=consume,
            workers=workers or None,
            progress=progress,
        )
    if json_report:
        print(json.dumps(report_dict(outcome, dst), indent=1))
    else:
        print_report(outcome, dst, Console(soft_wrap=True))


def encoder_of(name: str, root: Path, files: list[Path], tokens: int, device: str):
    """See moet.calibrate.open. Raises ConfigError if torch or transformers is not installed, which rounding does without."""
    try:
        from moet.calibrate.open import open_encoder
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("moet"):
            raise
        raise ConfigError(
            f"scheme {name}: expected torch and transformers to be installed, as they are with vLLM, found no {e.name}. "
            "`--no-calibrate` needs neither"
        ) from None
    return open_encoder(root, name, files, tokens, device)


def scheme_of(scheme: str | None, calibrate: bool | None, calibration: list[Path] | None) -> str:
    """The scheme that the options name together. Raises ConfigError if there is none of that name, or they contradict
    each other."""
    if calibrate is False and calibration:
        raise ConfigError(
            f"--calibration: expected no text beside --no-calibrate, found {calibration[0]}; leave one of the two out"
        )
    wanted = calibrate if calibrate is not None or not calibration else True
    if scheme is None:
        return PLAIN_SCHEME if wanted is False else DEFAULT_SCHEME
    if scheme_named(scheme).calibrated != wanted and wanted is not None:
        raise ConfigError(
            f"scheme: expected one that {'is' if wanted else 'is not'} calibrated, as the options say, found {scheme}"
        )
    return scheme


def report_dict(outcome, dst: Path) -> dict:
    """The report that moet.json has, with what only this run knows: where, how long, whether it continued
    another."""
    import msgspec

    m = outcome.manifest
    return {
        "pack": str(dst), "fingerprint": m.fingerprint, "architecture": m.source.architecture, "layers": len(m.layers),
        "report": msgspec.to_builtins(m.report), "bytes": pack_bytes(m), "seconds": round(outcome.seconds, 3),
        "scheme": m.scheme, "calibration": msgspec.to_builtins(m.calibration), "source_bytes": outcome.packed_bytes, "resumed": outcome.resumed, "was_finished": outcome.was_finished,
    }  # fmt: skip


def print_calibration(manifest, console: Console) -> None:
    """What calibration did, in two lines; nothing without it."""
    from statistics import fmean

    layers = [layer for layer in manifest.layers if layer.calibration]
    if not layers:
        return
    c, errors = manifest.calibration, [fmean(layer.calibration.output_error) for layer in layers]
    few = sum(layer.calibration.fallback for layer in layers)
    console.print(
        f"{manifest.scheme}, calibrated on {c.tokens} tokens: output error {fmean(errors):.4f}, "
        f"from {min(errors):.4f} to {max(errors):.4f} by layer",
        highlight=False,
    )
    least, median = (
        min(getattr(x.calibration, name) for x in layers) for name in ("tokens_min", "tokens_median")
    )
    rounded = len(manifest.layers) - len(layers)
    console.print(
        f"tokens of an expert: at least {least}, median at least {median}; {few} of {sum(x.experts for x in layers)} experts "
        f"leaned on their layer's statistics"
        + (f"; {rounded} MTP layers without calibration" if rounded else ""),
        highlight=False,
    )


def pack_bytes(manifest) -> int:
    rows = sum(f.bytes for layer in manifest.layers for f in (layer.base, layer.native) if f)
    return rows + sum(f.bytes for f in manifest.files.values())


def print_report(outcome, dst: Path, console: Console) -> None:
    from moet.pack.report import worst
    from moet.pack.space import gib

    m, r = outcome.manifest, outcome.manifest.report
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("projection", "relative RMS error", "sign bias", "mean |bias| of a matrix"):
        table.add_column(column, justify="left" if column == "projection" else "right")
    for name in ("gate", "up", "down"):
        p = getattr(r, name)
        table.add_row(name, f"{p.error:.4f}", f"{p.bias:+.6f}", f"{p.mean_abs_bias:.6f}")
    console.print(table)
    print_calibration(m, console)
    error, where = worst(m.layers)
    native = (
        f", native {r.native_bits:.3f} bits a weight ({gib(r.native_bytes)})"
        if r.native_bytes
        else ", no native rows"
    )
    console.print(f"largest error {error:.4f}: {where}", highlight=False)
    console.print(
        f"base {r.base_bits:.3f} bits a weight ({gib(r.base_bytes)}){native}, dense {gib(r.dense_bytes)}",
        highlight=False,
    )
    speed = (
        f", {outcome.packed_bytes / max(outcome.seconds, 1e-9) / 1e9:.2f} GB/s of source"
        if outcome.packed_bytes
        else ""
    )
    did = (
        "was finished already"
        if outcome.was_finished
        else f"{'continued and ' if outcome.resumed else ''}finished in {outcome.seconds:.1f} s{speed}"
    )
    console.print(
        f"{dst}: {gib(pack_bytes(m))}, {len(m.layers)} MoE layers, {did}", highlight=False, markup=False
    )
    console.print(f"fingerprint {m.fingerprint}", highlight=False)
