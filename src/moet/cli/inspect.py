"""`moet inspect PATH`: what a checkpoint or a pack is, from headers and manifests alone; no weights are
read."""

import json
from collections.abc import Callable, Hashable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

Item = TypeVar("Item")


def inspect(
    path: Annotated[Path, typer.Argument(help="checkpoint folder, or pack folder")],
    json_report: Annotated[bool, typer.Option("--json", help="print what is known as JSON")] = False,
) -> None:
    """Shows what a checkpoint or a pack is: its model, its experts, their formats and sizes."""
    from moet.pack.manifest import NAME

    found = describe_pack(path) if (path / NAME).is_file() else describe_checkpoint(path)
    if json_report:
        print(json.dumps(found, indent=1))
    else:
        show(found, Console(soft_wrap=True, highlight=False, markup=False))


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Facts of a checkpoint whose shards are all there. Raises CheckpointError for anything that is wrong
    with names, shapes or files."""
    from moet.checkpoint import Checkpoint
    from moet.quantize.schemes import DEFAULT_SCHEME, scheme

    base_format = scheme(DEFAULT_SCHEME).row_format
    checkpoint = Checkpoint.open(path)
    checkpoint.check()
    spec = checkpoint.spec
    groups = []
    for same in grouped(
        spec.layers,
        lambda x: (
            x.experts,
            x.inter,
            x.mtp,
            checkpoint.native_format(x.index),
            checkpoint.scale_dtype(x.index),
        ),
    ):
        first = same[0]
        groups.append(
            {
                "layers": [x.index for x in same],
                "mtp": first.mtp,
                "experts": first.experts,
                "inter": first.inter,
                "format": checkpoint.native_format(first.index),
                "scale_dtype": checkpoint.scale_dtype(first.index),
                "biased": checkpoint.biased(first.index),
                "expert_bytes": checkpoint.expert_bytes(first.index),
                "native_row_bytes": row_bytes(
                    checkpoint.native_format(first.index),
                    spec.hidden,
                    first.inter,
                    checkpoint.biased(first.index),
                ),
                "base_format": base_format,
                "base_row_bytes": row_bytes(base_format, spec.hidden, first.inter, checkpoint.biased(first.index)),
            }
        )
    dense = sum(
        checkpoint.tensor_info(n).nbytes for shard in checkpoint.shards for n in checkpoint.dense_names(shard)
    )
    base, native, stored = (
        sum(g[key] * g["experts"] * len(g["layers"]) for g in groups)
        for key in ("base_row_bytes", "native_row_bytes", "expert_bytes")
    )
    return {
        "kind": "checkpoint",
        "path": str(path),
        "architecture": spec.architecture,
        "hidden": spec.hidden,
        "num_layers": spec.num_layers,
        "top_k": spec.top_k,
        "activation": activation(spec.activation),
        "groups": groups,
        "shards": len(checkpoint.shards),
        "tensors": len(checkpoint.names),
        "expert_bytes": stored,
        "dense_bytes": dense,
        "pack": {"base_bytes": base, "native_bytes": native, "dense_bytes": dense},
    }


def describe_pack(path: Path) -> dict[str, Any]:
    """Facts of a pack. Raises PackError if it is damaged, unfinished, or of another version."""
    import msgspec

    from moet.pack import Pack

    pack = Pack.open(path)
    m = pack.manifest
    groups = []
    for same in grouped(
        m.layers,
        lambda x: (
            x.experts,
            x.inter,
            x.mtp,
            x.native and x.native.format,
            x.native and x.native.scale_dtype,
            x.base.format,
        ),
    ):
        first = same[0]
        groups.append(
            {
                "layers": [x.index for x in same],
                "mtp": first.mtp,
                "experts": first.experts,
                "inter": first.inter,
                "format": first.native.format if first.native else "",
                "scale_dtype": first.native.scale_dtype if first.native else "",
                "biased": first.biased,
                "native_row_bytes": first.native.row_bytes if first.native else 0,
                "base_format": first.base.format,
                "base_row_bytes": first.base.row_bytes,
            }
        )
    return {
        "kind": "pack",
        "path": str(path),
        "architecture": m.source.architecture,
        "hidden": pack.hidden,
        "top_k": pack.top_k,
        "activation": activation(pack.activation),
        "format_version": m.moet,
        "fingerprint": pack.fingerprint,
        "scheme": m.scheme,
        "calibration": msgspec.to_builtins(m.calibration),
        "precisions": ["base", "native"] if pack.has_native else ["base"],
        "groups": groups,
        "report": msgspec.to_builtins(m.report),
        "pack": {
            "base_bytes": m.report.base_bytes,
            "native_bytes": m.report.native_bytes,
            "dense_bytes": m.report.dense_bytes,
        },
    }


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Neighbouring items with equal keys together."""
    return [list(same) for _, same in groupby(items, key)]


def row_bytes(format: str, hidden: int, inter: int, biased: bool) -> int:
    """Bytes of a pack's row; the experts of a pack are nothing but rows (and a header of 4096 bytes a
    layer)."""
    from moet.layout import RowGeometry

    return RowGeometry(format, hidden, inter, biased).row_bytes


def activation(a: Any) -> str:
    """ "swiglu", "swiglu, limit 10"."""
    return a.kind + (f", limit {a.limit:g}" if a.limit is not None else "")


def size(n: int) -> str:
    """Bytes for people, in units of 1024."""
    value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def span(layers: list[int]) -> str:
    """ "3-60", "61", "1,3,5"."""
    if layers == list(range(layers[0], layers[-1] + 1)):
        return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def show(found: dict[str, Any], console: Console) -> None:
    """The same facts as two tables and a few lines."""
    console.print(f"{found['path']}: {found['kind']} of {found['architecture']}")
    facts = f"hidden {found['hidden']}, top {found['top_k']} experts a token, {found['activation']}"
    if found["kind"] == "checkpoint":
        facts += f"; {found['tensors']} tensors in {found['shards']} files, every one claimed"
    else:
        facts += f"; pack format {found['format_version']}, precisions {', '.join(found['precisions'])}"
    console.print(facts)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "layers",
        "experts",
        "inter",
        "native format",
        "scales",
        "native expert",
        "base format",
        "base expert",
        "base bits",
    ):
        left = column in ("layers", "native format", "scales", "base format")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for g in found["groups"]:
        weights = 3 * found["hidden"] * g["inter"]
        native = g.get("expert_bytes", g["native_row_bytes"])
        name = (g["format"] or "not kept") + (", biases" if g["biased"] else "")
        table.add_row(
            span(g["layers"]) + (" (MTP)" if g["mtp"] else ""),
            str(g["experts"]),
            str(g["inter"]),
            name,
            g["scale_dtype"] or "none",
            size(native) if native else "none",
            g["base_format"],
            size(g["base_row_bytes"]),
            f"{8 * g['base_row_bytes'] / weights:.3f}",
        )
    console.print(table)
    p = found["pack"]
    if found["kind"] == "checkpoint":
        console.print(
            f"routed experts {size(found['expert_bytes'])}, everything else {size(found['dense_bytes'])}"
        )
        console.print(
            f"as a pack: {size(p['base_bytes'] + p['dense_bytes'])} with base rows only, "
            f"{size(p['base_bytes'] + p['native_bytes'] + p['dense_bytes'])} with native rows too"
        )
        return
    native = f", native {size(p['native_bytes'])}" if p["native_bytes"] else ""
    console.print(
        f"base {size(p['base_bytes'])}{native}, everything else {size(p['dense_bytes'])}; "
        f"fingerprint {found['fingerprint']}"
    )
    report = found["report"]
    bits = f", native {report['native_bits']:.3f}" if report["native_bits"] else ""
    seen = found["calibration"]
    text = f", calibrated on {seen['tokens']} tokens in windows of {seen['window']}" if seen else ""
    console.print(f"scheme {found['scheme']}{text}")
    console.print(f"bits a weight: base {report['base_bits']:.3f}{bits}")
    for name in ("gate", "up", "down"):
        r = report[name]
        console.print(
            f"{name}: relative RMS error {r['error']:.4f}, sign bias {r['bias']:+.6f}, "
            f"mean |bias| of a matrix {r['mean_abs_bias']:.6f}"
        )
