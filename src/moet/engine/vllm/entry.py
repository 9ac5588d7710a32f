"""Where a run begins: EngineArgs.create_engine_config, through which LLM, `vllm serve` and every API server make their VllmConfig."""

import atexit
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

from moet.config import MoetConfig
from moet.engine.vllm import graphs
from moet.engine.vllm import run as runs
from moet.engine.vllm.run import Run
from moet.errors import EngineError

RUNS: list[Run] = []  # of this process, newest last: what /metrics and /v1/models show


def install() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = getattr(EngineArgs, "create_engine_config", None)
    if original is None:
        raise EngineError("vllm: expected EngineArgs.create_engine_config, found none; moet supports vLLM 0.32 (CPU) and 0.33 (CUDA)")
    if getattr(original, "moet", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = begin(self)
        if begun is None:
            return original(self, *args, **kwargs)
        config = original(self, *args, **kwargs)
        finish(config, begun)
        RUNS.append(begun)
        usage = kwargs.get("usage_context", args[0] if args else None)
        if getattr(usage, "name", "") == "OPENAI_API_SERVER":
            from moet.engine.vllm import http

            http.install()
        return config

    create_engine_config.moet = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def begin(args: Any) -> Run | None:
    """The run that `args` (EngineArgs) ask for, or None: moet is off. Fills in what the model needs: quantization method, load format."""
    folder = Path(str(args.model))
    packed = (folder / "moet.json").is_file()
    values = runs.moet_values(args.additional_config)
    if values is None and not packed:
        return None
    from moet.engine.vllm.activate import activate

    activate()
    settings = MoetConfig.from_dict(values or {})
    if not packed:
        if not (folder / "config.json").is_file():
            raise EngineError(
                f"model {args.model}: expected a pack or a checkpoint folder, found neither; `moet serve {args.model}` fetches and packs a Hub id"
            )
        if args.quantization is None and not is_quantized(folder):
            args.quantization = "moet"
    if args.load_format in ("auto", "hf", "safetensors"):
        args.load_format = "moet"
    device = device_type()
    if device == "cuda":
        gpu_defaults(args)
    several = args._api_process_count > 1 and args._api_process_rank >= 0
    launcher = os.getppid() if several else os.getpid()
    run_dir = runs.make_run_dir(settings, launcher, device)
    if not settings.run_dir and launcher == os.getpid():
        atexit.register(remove, run_dir, launcher)
    return Run(str(folder.resolve()), packed, settings, run_dir)


def device_type() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type


def gpu_defaults(args: Any) -> None:
    """A worker that sizes the slots between KV cache and capture, and graphs of whole decode steps, unless the user chose."""
    from vllm.config import CUDAGraphMode
    from vllm.logger import init_logger

    from moet.engine.vllm.refuse_gpu import WORKER

    if args.worker_cls == "auto":
        args.worker_cls = WORKER
    if graphs.set_default(args, CUDAGraphMode.FULL_DECODE_ONLY):
        init_logger("vllm.moet").info("moet: cudagraph_mode FULL_DECODE_ONLY: decode steps are captured whole, steps with prefills run eagerly")


def finish(config: Any, run: Run) -> None:
    from moet.engine.vllm.refuse import check

    check(config, run)
    config.additional_config = run
    if config.device_config.device_type == "cpu" and config.model_config.use_mla:
        # vLLM's CPU rotary op takes the number of heads from the last dimension, so it rotates MLA's 3-D queries wrongly (0.32:
        # csrc/cpu/pos_encoding.cpp); the PyTorch implementation is right.
        ops = config.compilation_config.custom_ops
        if not any(op.lstrip("+-") == "rotary_embedding" for op in ops):
            ops.append("-rotary_embedding")


def is_quantized(folder: Path) -> bool:
    """Whether vLLM will find a quantization config of the checkpoint's own."""
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("text_config") or {}
    return bool(
        config.get("quantization_config")
        or inner.get("quantization_config")
        or config.get("compression_config")
        or (folder / "hf_quant_config.json").is_file()
    )


def remove(run_dir: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(run_dir, ignore_errors=True)
