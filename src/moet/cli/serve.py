"""`moet serve MODEL -- VLLM ARGUMENTS`: finds or makes the pack, then becomes `vllm serve`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moet.engine import launch, packcache
from moet.engine.packcache import PackCache
from moet.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Wanted:
    """What is to be served: a folder that exists, or a pack (`cached`, in the cache) that may have to be made from `source` first."""

    name: str
    folder: Path
    cached: str = ""
    source: str = ""


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="pack, checkpoint folder, or Hub id ORG/NAME")],
    precision: Annotated[str, typer.Option(help="base: 2-bit experts; native: the checkpoint's own")] = "base",
    ram: Annotated[str, typer.Option("--ram", "--ram-gib", help="memory for experts: GiB, a percentage of their bytes, or auto: all of them (on a GPU's machine, what fits)")] = "auto",
    gpu: Annotated[str, typer.Option("--gpu", "--gpu-gib", help="GPU memory for experts, of each GPU: GiB, or a percentage of the bytes there; default: what the KV cache leaves")] = "",
    direct: Annotated[bool, typer.Option("--direct", help="no pack: encode the checkpoint's experts into memory at start; needs --ram 100%")] = False,
    activations: Annotated[str, typer.Option(help="number format of activations inside the experts: int24, fp32 (as accurate, slower), int16, int8 (coarser, faster)")] = "int24",
    io_threads: Annotated[int, typer.Option(help="threads that read rows")] = 8,
    buffered: Annotated[bool, typer.Option("--buffered", help="read through the page cache, not around it")] = False,
    cache_dir: Annotated[Path | None, typer.Option(help="where packs are made and kept; ~/.cache/moet")] = None,
    cache_gib: Annotated[float, typer.Option(min=0, max=1 << 20, help="before a new pack is made, remove the least recently used ones over this size; 0: no limit")] = 0.0,
    print_only: Annotated[bool, typer.Option("--print", help="print command, environment and settings as JSON, and do nothing")] = False,
) -> None:
    """Serves a Mixture-of-Experts model with vLLM. What follows -- goes to `vllm serve` as it is, and overrides moet's defaults."""
    cache = PackCache(cache_dir or packcache.default_dir())
    values = {"precision": precision, "activations": activations, "io_threads": io_threads, "direct_io": not buffered, **budget(ram), **gpu_budget(gpu)}
    launch.settings_of(values)
    wanted = find(model, precision, direct, cache)
    start = launch.build(str(wanted.folder), wanted.name, values, context.args, notes_of(wanted, cache))
    if print_only:
        print(start.as_json())
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if wanted.cached:
        while True:
            make(wanted, precision, cache, cache_gib, console)
            held = cache.hold(wanted.cached)  # the descriptor stays open in the server
            if cache.has(wanted.cached):
                break
            os.close(held)  # removed by another process between the two lines
    said = ram if ram == "auto" or ram.endswith("%") else f"{packcache.parse_gib(ram, '--ram') / (1 << 30):g} GiB"
    console.print(f"moet: serving {wanted.folder} as {wanted.name}, {precision} experts, RAM for them: {said}", markup=False)
    start.run()


def budget(ram: str) -> dict[str, float]:
    """ "25%", GiB or "auto" -> settings. Raises ConfigError."""
    if ram == "auto":
        return {}
    if ram.endswith("%"):
        try:
            percent = float(ram[:-1])
        except ValueError:
            percent = -1.0
        if not 0 < percent <= 100:
            raise ConfigError(f"--ram: expected more than 0% and at most 100%, found {ram!r}")
        return {} if percent == 100 else {"ram_percent": percent}
    size = packcache.parse_gib(ram, "--ram")
    if size == 0:
        raise ConfigError("--ram: expected more than 0 GiB, found 0; experts are computed from memory, so some must fit")
    return {"ram_gib": size / (1 << 30)}


def gpu_budget(gpu: str) -> dict[str, float]:
    """As `budget`; "" for none. Raises ConfigError."""
    if not gpu:
        return {}
    if not gpu.endswith("%"):
        size = packcache.parse_gib(gpu, "--gpu")
        if size == 0:
            raise ConfigError("--gpu: expected more than 0 GiB, found 0; experts are computed from slots, so some must fit. Leave it out for what the KV cache leaves")
        return {"gpu_gib": size / (1 << 30)}
    try:
        percent = float(gpu[:-1])
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise ConfigError(f"--gpu: expected more than 0% and at most 100%, found {gpu!r}")
    return {"gpu_percent": percent}


def find(model: str, precision: str, direct: bool, cache: PackCache) -> Wanted:
    """Raises CheckpointError if `model` is nothing that can be served."""
    from moet.checkpoint.sources_remote import HubSource, is_hub_id

    folder = Path(model)
    if folder.is_dir():
        folder = folder.resolve()
        if (folder / "moet.json").is_file():
            if direct:
                raise ConfigError(f"--direct: expected a checkpoint, found the pack {model}; leave --direct out")
            return Wanted(folder.name, folder)
        if direct:
            return Wanted(folder.name, folder)
        return in_cache(folder.name, packcache.local_key(folder), precision, cache, str(folder))
    if not is_hub_id(model):
        raise CheckpointError(f"{model}: expected a pack, a checkpoint folder or a Hub id ORG/NAME, found {'a file' if folder.exists() else 'neither'}")
    source = HubSource(model)
    if direct or "moet.json" in source.names:
        from huggingface_hub import snapshot_download

        return Wanted(model, Path(snapshot_download(model, revision=source.commit)))
    return in_cache(model, packcache.hub_key(model, source.commit), precision, cache, model)


def in_cache(name: str, key: str, precision: str, cache: PackCache, source: str) -> Wanted:
    """A pack with native rows serves both precisions; for `base` alone a smaller one is made."""
    full = f"{name.replace('/', '--')}-{key}"
    chosen = full if precision == "native" or cache.has(full) else f"{full}-base"
    return Wanted(name, cache.path(chosen), chosen, source)


def notes_of(wanted: Wanted, cache: PackCache) -> list[str]:
    if wanted.cached and not cache.has(wanted.cached):
        return [f"the pack does not exist yet: it is made from {wanted.source} first"]
    return []


def make(wanted: Wanted, precision: str, cache: PackCache, cache_gib: float, console: Console) -> None:
    """Packs into the cache if that has not been done; an interrupted pack goes on where it stopped."""
    if cache.has(wanted.cached):
        return
    from moet.cli.pack import BarProgress, open_source
    from moet.pack.packer import pack

    if cache_gib:
        for entry in cache.prune(int(cache_gib * (1 << 30)), keep=wanted.cached):
            console.print(f"moet: removed {entry.path} ({entry.bytes / (1 << 30):.2f} GiB), not used for longest", markup=False)
    with cache.writing(wanted.cached):
        if cache.has(wanted.cached):
            return
        console.print(f"moet: packing {wanted.source} into {wanted.folder}", markup=False)
        with BarProgress(console) as progress:
            source = open_source(wanted.source, wanted.folder, consume=False, wait=120.0, revision=None, progress=progress)
            outcome = pack(source, wanted.folder, native=precision == "native", progress=progress)
        console.print(f"moet: packed in {outcome.seconds:.1f} s", markup=False)
        if precision == "base":
            scheme = outcome.manifest.scheme
            console.print(f"moet: its 2-bit rows are only rounded ({scheme}); those of `moet pack {wanted.source} PACK` are calibrated and answer better", markup=False)
