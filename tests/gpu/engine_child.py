"""One engine of vLLM over the demo's pack, in a process of its own: asks, disturbs the rows' way to the GPU, asks again. Its answers as JSON.

    python tests/gpu/engine_child.py PACK OUT.json [--mtp] [--faults] [--wide] [--native]
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
TOKENS = 24
TEXTS = ["Hello world, this is a test of paging", "abc", "The quick brown fox jumps over the lazy dog. " * 3]
EIO, SHORT, DELAY, FLIP = 0, 1, 2, 3   # HostStore.inject


class Engine:
    def __init__(self, pack: str, mtp: bool = False, wide: bool = False, native: bool = False) -> None:
        import moet.engine.vllm
        from moet.moe.device import DeviceRuntime

        moet.engine.vllm.register()
        allocate = DeviceRuntime.allocate
        DeviceRuntime.allocate = lambda runtime, gpu_bytes=0: allocate(runtime, gpu_bytes, runtime.gpu_bytes_minimum())   # resize may go there later
        from vllm import LLM

        settings = {"gpu_percent": 100, "wait_limit_s": 3, "heat_dir": str(Path(pack).parent / "heat"), "precision": "native" if native else "base"}
        settings |= {} if wide or native else {"ram_percent": 30}
        sizes = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 512} if wide else {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
        self.llm = LLM(
            model=pack, dtype="bfloat16", **sizes, seed=0, kv_cache_memory_bytes=1 << 28,
            gpu_memory_utilization=0.3, disable_log_stats=True, compilation_config={"mode": 0}, kernel_config={"enable_jit_warmup": False}, additional_config={"moet": settings}, **(MTP if mtp else {}),
        )  # fmt: skip
        from moet.engine.vllm import experts

        config = self.llm.llm_engine.vllm_config
        self.mode = config.compilation_config.cudagraph_mode.name
        self.experts = experts.existing(config.additional_config)
        self.runtime, self.store = self.experts.runtime, self.experts.store

    def ask(self, what: str, prompts: list | None = None, reset: bool = True, tokens: int = TOKENS) -> dict:
        """reset: begin without cached prefixes, whose use would change the shape of the first step."""
        from vllm import SamplingParams

        if reset:
            self.llm.reset_prefix_cache()
        begun = time.monotonic()
        outputs = self.llm.generate(prompts or TEXTS, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        found = {"ids": [list(o.outputs[0].token_ids) for o in outputs], "reasons": [o.outputs[0].finish_reason for o in outputs]}
        print(f"engine: {what}: {len(found['ids'])} x {', '.join(sorted(set(found['reasons'])))}; {time.monotonic() - begun:.2f} s", flush=True)
        return found

    def cold(self) -> None:
        self.runtime.resize(self.runtime.gpu_bytes_minimum())

    def inject(self, kind: int, value: int, times: int) -> None:
        """Into every row of every layer."""
        for layer, source in self.store.layers.items():
            for expert in range(source.experts):
                self.store.inject(layer, expert, kind, value, times)


def numbers(count: int, seed: int) -> dict:
    """A prompt of `count` tokens."""
    return {"prompt_token_ids": [10 + (seed * 7919 + i * i * 31 + i * 101) % 500 for i in range(count)]}


def wide(engine: Engine) -> dict:
    """64 requests at once; then 8 whose prompts share 96 tokens, twice, so that the second time finds them cached; then one prompt of more tokens than a step takes, beside three others."""
    shared = [{"prompt_token_ids": numbers(96, 1)["prompt_token_ids"] + numbers(5 + i, 100 + i)["prompt_token_ids"]} for i in range(8)]
    return {
        "64": engine.ask("64 requests", [numbers(4 + i % 9, i) for i in range(64)], tokens=12),
        "shared": engine.ask("a shared prefix", shared, tokens=8),
        "cached": engine.ask("a cached prefix", shared, reset=False, tokens=8),
        "chunked": engine.ask("a prompt in chunks", [numbers(20, 3), numbers(900, 4), numbers(30, 5), numbers(7, 6)], tokens=8),
    }


def main() -> None:
    pack, out, *options = sys.argv[1:]
    begun = time.monotonic()
    engine = Engine(pack, *(f"--{what}" in options for what in ("mtp", "wide", "native")))
    print(f"engine: started in {time.monotonic() - begun:.0f} s, {engine.mode}", flush=True)
    found = {"mode": engine.mode, "armed_before": engine.runtime.counters().hits + engine.runtime.counters().misses, "coverage": engine.runtime.coverage()}
    found["resident"] = engine.ask("resident")
    engine.cold()
    found["cold"] = engine.ask("cold")
    found["counters"] = {"misses": engine.runtime.counters().misses, "arena_misses": engine.runtime.counters().arena_misses}
    if "--wide" in options:
        engine.runtime.resize(0)
        found["wide resident"] = wide(engine)
        engine.cold()
        found["wide cold"] = wide(engine)
        engine.runtime.resize(max(engine.runtime.gpu_bytes_minimum(), engine.experts.rows_bytes // 4))
        found["wide quarter"] = wide(engine)
    found["one"] = engine.ask("one request", TEXTS[:1])
    if "--faults" in options:
        words = engine.experts.words
        for name, kind, value, times in (("delay", DELAY, 20_000, 1), ("short", SHORT, 4096, 3)):
            engine.inject(kind, value, times)
            engine.cold()
            found[name] = engine.ask(name)
            engine.inject(kind, value, 0)
        found["failures_before"] = words.count(0)
        for name, kind, value in (("eio", EIO, 5), ("flip", FLIP, 100)):
            engine.inject(kind, value, 1 << 30)
            engine.cold()
            found[name] = engine.ask(name) | {"why": words.message(0)}
            engine.inject(kind, value, 0)
            found[f"after_{name}"] = engine.ask(f"after {name}", reset=False)   # the failure has emptied the prefix cache: blocks of a failed step would show here
        engine.store.stop_server()
        engine.cold()
        found["dead"] = engine.ask("dead reader") | {"why": words.message(0)}
        engine.runtime.resize(0)   # what the arena holds can still be asked for; what it does not, fails again, and again in bounded time
        found["still_dead"] = engine.ask("dead reader, again")
    Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
