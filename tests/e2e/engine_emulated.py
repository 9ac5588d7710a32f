"""vLLM on the CPU whose experts are a GPU's: kernels run in the emulator, everything above them is what serves on CUDA. Used as tests/e2e/engine_run.py is.

    python -m tests.e2e.engine_emulated PACK OUT.json [--mtp] [--async]
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_LOGGING_LEVEL="WARNING",
                  HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")  # fmt: skip
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
PROMPTS, TOKENS = ([5, 9, 40, 3, 77, 12], [8, 8, 30], [100, 2, 60, 61, 62]), 5
EIO = 0  # HostStore.inject


def emulate() -> None:
    """From now on experts of a CPU are those of an emulated GPU."""
    import torch
    from vllm.forward_context import get_forward_context

    from moet.engine.vllm import experts
    from moet.engine.vllm.device_experts import DeviceExperts
    from moet.kernels.expert_mlp.cuda import SOURCES
    from moet.moe.device import PAGER_SOURCES, DeviceRuntime
    from tests.cpu.emulator.build import EmulatedModule

    allocate = DeviceRuntime.allocate
    DeviceRuntime.allocate = lambda runtime, gpu_bytes=0: allocate(runtime, gpu_bytes, runtime.gpu_bytes_minimum())

    class Emulated(DeviceExperts):
        def open(self, run: Any, opened: Any, config: Any) -> None:
            super().open(run, opened, config)
            self.allocate(self.rows_bytes, 0, frozenset())

        def hardware(self, sources: Any) -> tuple[Any, Any, Any]:
            modules = {f: EmulatedModule(SOURCES, {"FORMAT": f}) for f in {s.geometry.format_index for s in sources.values()}}
            return torch.device("cpu"), None, modules | {-1: EmulatedModule(PAGER_SOURCES, {})}

        def capturing(self) -> bool:
            return False

        def forward(self, *arguments: Any) -> torch.Tensor:
            self.slot_layers = frozenset(get_forward_context().slot_mapping)   # MoetWorker has them from the KV cache's configuration
            return super().forward(*arguments)

    experts.Experts = Emulated


def schedule_ahead() -> None:
    """Async scheduling and two steps in flight, as on a GPU; vLLM does not do that on a CPU by itself."""
    from moet.engine.vllm import entry

    finish = entry.finish

    def and_ahead(config: Any, run: Any) -> None:
        finish(config, run)
        config.scheduler_config.async_scheduling = True

    entry.finish = and_ahead


def main() -> None:
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    import moet.engine.vllm

    sampler.HAS_TRITON = False   # Triton's interpreter cannot run vLLM's top-k kernel
    pack, out, *options = sys.argv[1:]
    moet.engine.vllm.register()
    emulate()
    if "--async" in options:
        schedule_ahead()
    from vllm import LLM, SamplingParams

    from moet.engine.vllm import experts

    settings = {"ram_percent": 50, "wait_limit_s": 1, "io_threads": 2, "heat_dir": str(Path(out).parent / "heat"), "run_dir": str(Path(out).parent / "run")}
    llm = LLM(
        model=pack, dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 26, seed=0,
        skip_tokenizer_init=True, disable_log_stats=True, additional_config={"moet": settings}, **(MTP if "--mtp" in options else {}),
    )  # fmt: skip
    gpu = experts.existing(llm.llm_engine.vllm_config.additional_config)
    runtime, store = gpu.runtime, gpu.store

    def ask() -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
        outputs = [o.outputs[0] for o in llm.generate(prompts, parameters, use_tqdm=False)]
        logprobs = [[step[i].logprob for step, i in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
        return {"ids": [list(o.token_ids) for o in outputs], "logprobs": logprobs, "reasons": [o.finish_reason for o in outputs]}

    def inject(kind: int, value: int, times: int) -> None:
        for layer, source in store.layers.items():
            for expert in range(source.experts):
                store.inject(layer, expert, kind, value, times)

    queue = llm.llm_engine.engine_core.engine_core.batch_queue
    found: dict[str, Any] = {"ahead": queue is not None, "before": runtime.counters().steps, "unarmed": runtime.counters().hits + runtime.counters().misses}
    gpu.start()
    found["resident"] = ask()
    runtime.resize(runtime.gpu_bytes_minimum())
    found["cold"] = ask()
    found["counters"] = vars(runtime.counters())
    inject(EIO, 5, 1 << 30)
    runtime.resize(runtime.gpu_bytes_minimum())
    found["eio"] = ask() | {"why": gpu.words.message(0)}
    inject(EIO, 5, 0)
    found["after"] = ask()
    gpu.watch.count()
    found["shown"] = json.loads(gpu.watch.path.read_text())
    gpu.close()
    found["heat"] = len(list((Path(out).parent / "heat").glob("*.json")))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
