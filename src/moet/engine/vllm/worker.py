"""vLLM's GPU worker, with a share of the memory for expert slots. Chosen by --worker-cls, which `moet.engine.vllm.entry` sets."""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu_worker import Worker

from moet.engine.vllm import experts, graphs
from moet.engine.vllm import run as runs
from moet.engine.vllm.memory import Split, split
from moet.errors import EngineError

logger = init_logger("vllm.moet")
GRAPHS_BYTES = 1 << 30  # for CUDA graphs, where the KV cache's size was given and vLLM does not measure them


class MoetWorker(Worker):
    """Slots are allocated when the KV cache has its memory and before anything is captured; nothing pages before all graphs are."""

    moet: Any = None  # DeviceExperts of this process
    moet_split: Split | None = None

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.moet = experts.existing(runs.of(self.vllm_config))
        if self.moet is None:
            raise EngineError(f"model {self.model_config.model}: expected layers with routed experts, found none; serve it without moet")

    def determine_available_memory(self) -> int:
        kv = super().determine_available_memory()
        fixed = self.cache_config.kv_cache_memory_bytes is not None
        free = kv + self._left_beside(kv) if fixed else kv
        specs = self.get_kv_cache_spec().values()
        one = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)
        needs = self.moet.needs(kv if fixed else one * self.scheduler_config.max_num_seqs, kv if fixed else one)
        self.moet_split = split(free, needs, self.moet.run.settings.gpu_bytes(needs.rows))
        if fixed:
            self.moet_split = Split(kv, self.moet_split.slots)
        return self.moet_split.kv

    def _left_beside(self, kv: int) -> int:
        """Bytes within --gpu-memory-utilization that weights, the largest step and a KV cache of `kv` bytes leave."""
        torch.accelerator.empty_cache()
        used = self.init_snapshot.free_memory - torch.accelerator.get_memory_info()[0]
        step = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        return max(0, int(self.requested_memory) - used - step - GRAPHS_BYTES - kv)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        torch.accelerator.empty_cache()
        before = torch.accelerator.get_memory_info()[0]
        super().initialize_from_config(kv_cache_config)
        torch.accelerator.empty_cache()
        kv = max(0, before - torch.accelerator.get_memory_info()[0])
        slots, settings = self.moet_split.slots, self.moet.run.settings
        if settings.gpu_bytes(self.moet.rows_bytes) is None:  # what the KV cache did not take, in whole blocks of all ranks, is the slots' too
            slots = min(self.moet.rows_bytes, max(slots, self.moet_split.kv + self.moet_split.slots - kv))
        self.moet.allocate(slots, kv, slot_layers(kv_cache_config))
        if hasattr(self, "total_consumed"):  # of what vLLM says about --kv-cache-memory, and of the plan that it may save
            self.total_consumed += slots

    def compile_or_warm_up_model(self) -> Any:
        manager = self.model_runner.cudagraph_manager
        if manager is not None and manager.cudagraph_mode.name not in graphs.ALLOWED:
            raise EngineError(
                f"cudagraph_mode {manager.cudagraph_mode.name}, to which vLLM turned because the attention backend captures no whole steps: "
                "expected FULL_DECODE_ONLY or NONE; use --enforce-eager, or another --attention-backend"
            )
        times = super().compile_or_warm_up_model()
        self.moet.start()
        return times

    def shutdown(self) -> None:
        if self.moet is not None:
            self.moet.close()
        super().shutdown()


def slot_layers(kv_cache_config: Any) -> frozenset[str]:
    """Names of the attention layers whose tokens have KV slots: recurrent state, for one, has none."""
    names: set[str] = set()
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if (spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec).uses_slot_mapping:
            names |= set(group.layer_names)
    return frozenset(names)
