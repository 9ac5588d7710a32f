"""The experts of one worker process, shared by the model and its drafter, closed when the process or the engine ends. Here: a CPU's; device_experts.py has a GPU's."""

import json
import re
import time
import weakref
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from moet.cache.heat import save_heat
from moet.checkpoint import Checkpoint
from moet.config import MoetConfig
from moet.engine.packcache import default_dir
from moet.engine.vllm import step
from moet.engine.vllm.failure import Words
from moet.engine.vllm.run import Run
from moet.errors import EngineError, StoreError
from moet.models import spec_of
from moet.moe import ExpertRuntime
from moet.moe.encode import row_sources
from moet.pack import Pack, Rows
from moet.quantize.schemes import PLAIN_SCHEME
from moet.store import RowSource

logger = init_logger("vllm.moet")
HEAT_SECONDS = 60.0  # vLLM kills its workers when a server is stopped without --shutdown-timeout; then at most this much heat is lost

_shared: "weakref.WeakValueDictionary[Run, Experts]" = weakref.WeakValueDictionary()


def of(run: Run, config: Any) -> "Experts":
    """The experts of this process for `run`; the layers' methods keep them alive, so they go with the engine."""
    found = existing(run)
    if found is None:
        kind = Experts
        if config.device_config.device_type == "cuda":
            from moet.engine.vllm.device_experts import DeviceExperts

            kind = DeviceExperts
        found = _shared[run] = kind(run, config)
    return found


def existing(run: Run) -> "Experts | None":
    return _shared.get(run)


class Experts:
    """Opens the pack (or encodes the checkpoint) at construction. Raises MoetError subclasses with the reason if that cannot be."""

    def __init__(self, run: Run, config: Any) -> None:
        self.rank, self.world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.words = Words(run.run_dir)
        opened = Pack.open(run.source) if run.packed else Checkpoint.open(run.source)
        self.layers = {layer.index: layer for layer in (opened.layers.values() if run.packed else opened.spec.layers)}
        self.spec = spec_of(json.loads((Path(run.source) / "config.json").read_text()))
        self.heat = heat_file(run.settings, opened, self.rank, self.world) if isinstance(opened, Pack) else None
        self.precision, self.fingerprint = run.settings.precision, getattr(opened, "fingerprint", "")
        self.open(run, opened, config)

    def open(self, run: Run, opened: Pack | Checkpoint, config: Any) -> None:
        self.scan_tokens = run.settings.scan_tokens
        self.runtime = open_runtime(run, opened, self.heat, self.rank, self.world)
        self.saved = time.monotonic()
        self.close_with(ExpertRuntime.close, self.runtime)

    def close_with(self, close: Any, *arguments: Any) -> None:
        # Workers leave through multiprocessing's exit functions, the engine's own process through atexit: both close (and save the heat), once.
        self.close = weakref.finalize(self, close, *arguments)
        Finalize(None, self.close, exitpriority=10)

    def layer_index(self, prefix: str) -> int:
        """Number of the layer that vLLM calls `prefix`. Raises EngineError if the model has no routed experts there."""
        index = number_of(prefix, self.spec.num_layers)
        if index not in self.layers:
            known = ", ".join(map(str, self.layers))
            raise EngineError(f"{prefix}: expected one of the layers with routed experts ({known}), found {index}")
        return index

    def check_layer(self, index: int, layer: Any, prefix: str) -> None:
        """Raises EngineError if vLLM would compute this layer differently from how its experts were declared."""
        moe, mine = layer.moe_config, self.layers[index]
        activation = self.spec.activation
        swiglu = {"silu": "swiglu", "swigluoai": "swiglu_oai", "swigluoai_uninterleave": "swiglu_oai"}.get(moe.activation.value)
        facts = [
            ("experts", mine.experts, moe.num_experts),
            ("experts per token", self.spec.top_k, moe.experts_per_token),
            ("hidden size", self.spec.hidden, moe.hidden_dim),
            ("intermediate size", mine.inter, moe.intermediate_size),
            ("activation", activation.kind, swiglu),
            ("tensor-parallel size", self.world, moe.tp_size),
            ("router weights on the input", False, layer.apply_router_weight_on_input),
        ]
        wrong = [f"{name}: expected {expected}, found {actual}" for name, expected, actual in facts if expected != actual]
        if wrong:
            raise EngineError(f"{prefix}: vLLM builds this layer differently: " + "; ".join(wrong))

    def forward(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's part of the routed sum, [T, hidden], of x [T, hidden] with weights and ids [T, k]; zeros in rows that are no tokens."""
        now = step.current(self.scan_tokens, x.shape[0])
        if now.rows is None:
            return self.compute(layer, x, weights, ids, now.scan)
        out = torch.zeros_like(x)
        if len(now.rows):
            out[now.rows] = self.compute(layer, x[now.rows], weights[now.rows], ids[now.rows], now.scan)
        return out

    def compute(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scan: bool) -> torch.Tensor:
        """See ExpertRuntime.forward. A row that cannot be read gives zeros, and the failure word says so (moet.engine.vllm.failure)."""
        try:
            out = self.runtime.forward(layer, x.contiguous(), weights.float().contiguous(), ids.int().contiguous(), scan)
            self.save_heat_when_due()
            return out
        except StoreError as e:
            logger.error("moet: layer %d: %s", layer, e)
            self.words.add(self.rank, str(e))
            return torch.zeros_like(x)

    def save_heat_when_due(self) -> None:
        if self.heat is None or time.monotonic() - self.saved < HEAT_SECONDS:
            return
        self.saved = time.monotonic()
        try:
            save_heat(self.heat, self.fingerprint, self.precision, self.runtime.pager.heat())
        except OSError as e:
            logger.warning("moet: heat file %s cannot be written (%s); the next start will be cold", self.heat, e.strerror)
            self.heat = None


def open_runtime(run: Run, opened: Pack | Checkpoint, heat: Path | None, rank: int, world: int) -> ExpertRuntime:
    settings = run.settings
    options = {
        "precision": settings.precision,
        "rank": rank,
        "world": world,
        "threads": torch.get_num_threads(),
        "activations": settings.activations,
        "counters_path": run.counters_path(rank),
    }
    budget = settings.budget_bytes(bytes_of(opened, settings.precision)) // world
    if isinstance(opened, Checkpoint):
        runtime = ExpertRuntime.from_checkpoint(opened, budget_bytes=budget, **options)
    else:
        runtime = ExpertRuntime(
            opened, budget_bytes=budget, io_threads=settings.io_threads, direct_io=settings.direct_io,
            heat_file=heat, preheat=settings.preheat, **options,
        )  # fmt: skip
    write_info(run, rank, info_of(opened, settings.precision) | {"budget_bytes": budget, "activations": settings.activations})
    return runtime


def info_of(opened: Pack | Checkpoint, precision: str) -> dict[str, Any]:
    return {
        "fingerprint": getattr(opened, "fingerprint", ""),
        "row_format": formats_of(opened, precision),
        "scheme": "" if precision != "base" else opened.manifest.scheme if isinstance(opened, Pack) else PLAIN_SCHEME,
    }


def rows_of(opened: Pack | Checkpoint, precision: str) -> list[Rows | RowSource]:
    """Each layer's rows at a precision, in the pack or encoded from the checkpoint."""
    return [f.rows(precision) for f in opened.layers.values()] if isinstance(opened, Pack) else list(row_sources(opened, precision).values())


def bytes_of(opened: Pack | Checkpoint, precision: str) -> int:
    """Bytes of all those rows."""
    return sum(r.experts * r.geometry.row_bytes for r in rows_of(opened, precision))


def formats_of(opened: Pack | Checkpoint, precision: str) -> str:
    """Their format; "tcq2+sym2" where layers differ, in the layers' order."""
    return "+".join(dict.fromkeys(r.geometry.format for r in rows_of(opened, precision)))


def heat_file(settings: MoetConfig, pack: Pack, rank: int, world: int) -> Path:
    """Of this model at this precision, whatever the budget was. Ranks see the same routing; each has a file, so that none waits for another."""
    folder = Path(settings.heat_dir or default_dir() / "heat")
    return folder / f"{pack.fingerprint[:16]}-{settings.precision}-{rank}of{world}.json"


def write_info(run: Run, rank: int, info: dict[str, Any]) -> None:
    """rank-N.json, for /metrics: appears whole."""
    path = run.counters_dir / f"rank-{rank}.json"
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(info))
    partial.replace(path)


def number_of(prefix: str, num_layers: int) -> int | None:
    """The layer number in one of vLLM's names: "model.layers.3.mlp.experts" is 3; in an MTP module of its own ("mtp.layers.0...") it counts on from num_layers."""
    match = re.search(r"(?:^|\.)(mtp\.)?(?:layers\.)?(\d+)\.", prefix + ".")
    if match is None:
        return None
    return int(match[2]) + (num_layers if match[1] else 0)
