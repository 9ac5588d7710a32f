"""What moet does not do yet, asked for: refused at start, each with the setting, the reason and the way out."""

from pathlib import Path
from typing import Any

import torch

from moet.checkpoint import Checkpoint
from moet.engine.vllm import compat, refuse_gpu
from moet.engine.vllm.run import Run
from moet.errors import EngineError, StoreError
from moet.moe.encode import row_sources
from moet.pack import Pack
from moet.store import Pager

DTYPES = (torch.float32, torch.bfloat16)
SMALL = 1 << 30  # bytes; a budget that may be below the pager's minimum, a few rows, and whose arena costs nothing to try


def check(config: Any, run: Run) -> None:
    """Raises one EngineError with everything in `config` (VllmConfig) that cannot be served."""
    problems = [*platform(config, run), *parallel(config.parallel_config), *model(config), *experts(run, config.parallel_config.tensor_parallel_size)]
    if problems:
        raise EngineError("moet cannot serve this: " + "; ".join(problems))


def platform(config: Any, run: Run) -> list[str]:
    kind = config.device_config.device_type
    if kind == "cuda":
        return refuse_gpu.problems(config, run, compat.version())
    out = [] if kind == "cpu" else [f"device {kind}: expected cpu or cuda; no pager for others"]
    for name in ("gpu_gib", "gpu_percent"):
        if getattr(run.settings, name):
            out.append(f"moet.{name}: there are no GPU slots on device {kind}; leave it out, ram_gib is the budget here")
    return out


def parallel(p: Any) -> list[str]:
    out = []
    if p.enable_expert_parallel:
        out.append("--enable-expert-parallel: a row is sliced across ranks, not owned by one; use --tensor-parallel-size alone")
    if p.enable_eplb:
        out.append("--enable-eplb: experts are not placed on ranks, so there is nothing to balance; leave it out")
    if p.data_parallel_size > 1:
        out.append(f"--data-parallel-size {p.data_parallel_size}: vLLM would gather tokens across engines inside the MoE layer; run one server each")
    if p.pipeline_parallel_size > 1:
        out.append(f"--pipeline-parallel-size {p.pipeline_parallel_size}: not tried yet; use --tensor-parallel-size")
    if p.prefill_context_parallel_size > 1 or p.decode_context_parallel_size > 1:
        out.append("context parallelism: not tried yet; leave it out")
    if p.use_ubatching:
        out.append("--enable-dbo: one thread drives a pager, and two micro-batches would share it; leave it out")
    if p.nnodes > 1:
        out.append(f"--nnodes {p.nnodes}: ranks share their failure word through a folder of one machine; use one node")
    backend = p.distributed_executor_backend
    if backend not in (None, "mp", "uni"):
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        out.append(f"--distributed-executor-backend {name}: not tried yet; use mp")
    return out


def model(config: Any) -> list[str]:
    m, out = config.model_config, []
    if m.dtype not in DTYPES:
        out.append(f"--dtype {str(m.dtype).removeprefix('torch.')}: experts take float32 or bfloat16; use --dtype bfloat16")
    if m.enable_sleep_mode:
        out.append("--enable-sleep-mode: the arena is not vLLM's to put to sleep; leave it out")
    if config.lora_config is not None:
        out.append("--enable-lora: adapters on experts have no weights here to attach to; leave it out")
    if getattr(config, "weight_transfer_config", None) is not None:
        out.append("--weight-transfer-config: rows cannot be replaced while serving; restart with the new pack")
    if m.quantization_config is not None:
        out.append("--quantization-config: moet's precision decides how experts are stored; leave it out and set moet.precision")
    if config.load_config.load_format != "moet":
        out.append(f"--load-format {config.load_config.load_format}: the experts must not be read by vLLM; leave it out, or use --load-format moet")
    spec = config.speculative_config
    draft = spec.draft_model_config if spec is not None else None
    if draft is not None and draft.model != m.model and draft.is_moe:
        out.append(f"--speculative-config: drafter {draft.model} has experts of its own; use the model's own MTP layers or a dense drafter")
    return out


def experts(run: Run, world: int) -> list[str]:
    """Raises PackError if the pack is damaged or of another format version, CheckpointError if the checkpoint is not one that moet knows."""
    if run.packed:
        return rows(run, Pack.open(Path(run.source)), world)
    sources = row_sources(Checkpoint.open(run.source), run.settings.precision)
    needed = sum(s.experts * s.geometry.row_bytes for s in sources.values())
    budget = run.settings.budget_bytes(needed)
    if budget:
        return [f"a memory budget of {budget} bytes: a checkpoint without a pack needs room for all its experts, {needed} bytes; `moet pack` it first, or raise ram_gib"]
    return []


def rows(run: Run, pack: Pack, world: int) -> list[str]:
    precision = run.settings.precision
    if precision == "native" and not pack.has_native:
        return [f"precision native: {run.source} has base rows only; pack again with --native"]
    budget = run.settings.budget_bytes(sum(f.rows(precision).experts * f.rows(precision).geometry.row_bytes for f in pack.layers.values()))
    if 0 < budget < SMALL:
        try:  # here, and not first in a worker, whose reason the log buries
            Pager.from_pack(pack, precision, budget_bytes=budget // world, world=world, io_threads=1).close()
        except StoreError as e:
            return [f"memory for experts, a rank: {e}"]
    return []
