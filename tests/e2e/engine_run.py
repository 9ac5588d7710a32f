"""Engines one after another in one process of vLLM, as a plan says; the answers and counters of each as JSON.

    python -m tests.e2e.engine_run PLAN.json OUT.json

A step of the plan is {"name", "model", "engine": LLM(...) arguments, "prompts"?, "tokens"?, "spoil"?: [file, offset]}; "spoil" inverts one byte of a
file before the engine starts, asks, mends it, and asks again.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["Hello world, this is a test of paging", "abc", "The quick brown fox jumps over the lazy dog. " * 3]
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26, "disable_log_stats": True, "seed": 0}
# vLLM's CPU rotary op is wrong for latent attention; moet turns it off by itself, stock vLLM has to be told.
STOCK = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def run(steps: list[dict[str, Any]], folder: Path, runner: str = "V1", timeout: float = 900) -> dict[str, Any]:
    """Runs the steps in a process of their own. Raises RuntimeError with the end of its log if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, out = folder / "plan.json", folder / "out.json"
    plan.write_text(json.dumps(steps))
    env = {**os.environ, **ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2")), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "tests.e2e.engine_run", str(plan), str(out)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode or not out.exists():
        raise RuntimeError(f"exit status {done.returncode}: ...{(done.stdout + done.stderr)[-6000:]}")
    return json.loads(out.read_text())


def invert(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def main() -> None:
    steps = json.loads(Path(sys.argv[1]).read_text())
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    sampler.HAS_TRITON = False  # Triton's interpreter cannot run vLLM's top-k kernel, which a compiled engine's warm-up calls
    Path(sys.argv[2]).write_text(json.dumps({step["name"]: one(step) for step in steps}))


def one(step: dict[str, Any]) -> dict[str, Any]:
    try:
        return serve(step)
    except Exception as e:
        if step.get("may_fail"):
            return {"error": f"{type(e).__name__}: {e}"}
        raise
    finally:
        gc.collect()


def serve(step: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    if "spoil" in step:
        invert(Path(step["spoil"][0]), step["spoil"][1])
    llm = LLM(model=step["model"], **ENGINE | step.get("engine", {}))
    result = {"before": counters(), **ask(llm, step), "counters": counters()}
    if "spoil" in step:
        invert(Path(step["spoil"][0]), step["spoil"][1])
        result["mended"] = ask(llm, step)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    result["open"] = len(shared())
    return result


def ask(llm: Any, step: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=step.get("tokens", 12), logprobs=1, ignore_eos=True)
    outputs = [o.outputs[0] for o in llm.generate(step.get("prompts", PROMPTS), params, use_tqdm=False)]
    return {
        "ids": [list(o.token_ids) for o in outputs],
        "logprobs": [[p[i].logprob for p, i in zip(o.logprobs or [], o.token_ids)] for o in outputs],
        "finish": [o.finish_reason for o in outputs],
    }


def shared() -> list[Any]:
    module = sys.modules.get("moet.engine.vllm.experts")
    return list(module._shared.values()) if module else []


def counters() -> dict[str, int]:
    return {k: v for e in shared() for k, v in e.runtime.counters().as_dict().items() if k != "latency"}


if __name__ == "__main__":
    main()
