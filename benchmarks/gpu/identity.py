"""Claim G1: vLLM with full decode graphs gives the same logits, byte for byte, whatever the GPU's slots and the arena hold.

A run is one engine over one model: the demo, a small Qwen3-MoE, a small DeepSeek-V3; rows all in RAM, or 30 % of them and the rest on disk; with and without MTP. In it, the logits of every step
are hashed on the device, with every row in a slot first, then at the smallest coverage that works, at 10 % and at 50 %: from empty slots, again with what they then hold, and after a routing that
touches every expert of every layer; 1, 4 and 16 requests, and 3 and 5, which are between captured sizes. A pass counts if it has as many steps as the resident one, and the same hash for
every row of logits and the same tokens in each.

    python benchmarks/gpu/identity.py --out FOLDER [--runs demo/ram ...] [--quick] [--work FOLDER_ON_A_DISK]      within 4 minutes on an H200
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import identity_models
from record import ROOT, Claim
from report import Report

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
COVERAGES = ("smallest", "10 %", "50 %")
STEPS = {1: 200, 4: 200, 16: 200, 3: 32, 5: 32}
DISK_STEPS = {1: 200, 4: 80, 16: 32, 3: 20, 5: 20}   # a step that misses everything reads 50 MB and more
QUICK = {1: 24, 4: 24, 3: 8}
ARENA = 30   # percent of the rows, of the runs with a disk
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


@dataclass(frozen=True)
class Plan:
    model: str
    disk: bool = False
    mtp: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}/{'disk' if self.disk else 'ram'}{'/mtp' if self.mtp else ''}"


RUNS = {p.name: p for p in (
    Plan("demo"), Plan("qwen3"), Plan("deepseek", disk=True, mtp=True), Plan("demo", disk=True, mtp=True), Plan("qwen3", disk=True), Plan("deepseek"),
)}  # fmt: skip


def make_pack(model: str, work: Path) -> Path:
    """The model's pack of rounded 2-bit rows, made in `work` unless it is there."""
    from moet.checkpoint import LocalSource
    from moet.pack.packer import pack

    folder, source = work / model, work / f"{model}-source"
    if (folder / "moet.json").exists():
        return folder
    if model == "demo":
        source = ROOT / "demo" / "model"
    elif not (source / "config.json").exists():
        identity_models.write(model, source)
    pack(LocalSource(source), folder, native=False)
    return folder


class Recorder:
    """Hashes of the logits of each step, made and kept on the device: nothing waits for it until `take`."""

    def __init__(self, model: Any) -> None:
        self.rows: list[Any] = []
        self.on = False
        self.weights: Any = None
        original = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            if self.on:
                self.rows.append(self.hash(logits))
            return logits

        model.compute_logits = compute_logits

    def hash(self, logits: Any) -> Any:
        """int64 [rows]: sum of bits * a random odd weight of the column, mod 2^64."""
        import torch

        if self.weights is None:
            random = torch.Generator("cpu").manual_seed(1)
            self.weights = (torch.randint(-(1 << 62), 1 << 62, (logits.shape[-1],), generator=random) * 2 + 1).to(logits.device)
        bits = logits.contiguous().view(torch.int16 if logits.element_size() == 2 else torch.int32)
        return (bits.long() * self.weights).sum(-1)

    def take(self) -> list[list[int]]:
        found = [row.tolist() for row in self.rows]
        self.rows.clear()
        return found


class Engine:
    """One LLM, its experts and its recorder."""

    def __init__(self, plan: Plan, pack: Path, max_requests: int) -> None:
        import moet.engine.vllm
        from moet.moe.device import DeviceRuntime

        moet.engine.vllm.register()
        allocate = DeviceRuntime.allocate
        # Graphs of a layer hold as many waves as the fewest slots need that `resize` may leave.
        DeviceRuntime.allocate = lambda runtime, gpu_bytes=0: allocate(runtime, gpu_bytes, runtime.gpu_bytes_minimum())
        from vllm import LLM

        settings = {"gpu_percent": 100, "heat_dir": str(pack.parent / "heat")} | ({"ram_percent": ARENA} if plan.disk else {})
        self.llm = LLM(
            model=str(pack), dtype="bfloat16", max_model_len=1024, max_num_seqs=max_requests, max_num_batched_tokens=2048, enable_prefix_caching=False, seed=0,
            skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.5, disable_log_stats=True,
            compilation_config={"mode": 0}, additional_config={"moet": settings}, **(MTP if plan.mtp else {}),
        )  # fmt: skip
        from moet.engine.vllm import experts

        config = self.llm.llm_engine.vllm_config
        self.mode = config.compilation_config.cudagraph_mode.name
        self.experts = experts.existing(config.additional_config)
        self.runtime, self.store = self.experts.runtime, self.experts.store
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        self.graphs = sorted(d.num_tokens for d in runner.cudagraph_manager.graphs)
        self.recorder = Recorder(runner.model)
        self.vocab = config.model_config.get_vocab_size()

    def bytes_of(self, coverage: str) -> int:
        if coverage == "100 %":
            return 0
        least, rows = self.runtime.gpu_bytes_minimum(), self.experts.rows_bytes
        return least if coverage == "smallest" else max(least, rows * int(coverage.split()[0]) // 100)

    def generate(self, requests: int, tokens: int) -> dict[str, Any]:
        """Requests that all begin in the first step, with prompts of different lengths."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": [3 + (37 * i + 11 * j + i * j) % (self.vocab - 3) for j in range(9 + 3 * i)]} for i in range(requests)]
        before = asdict(self.runtime.counters())
        self.recorder.on = True
        begun = time.perf_counter()
        outputs = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False)
        seconds = time.perf_counter() - begun
        self.recorder.on = False
        after = asdict(self.runtime.counters())
        return {
            "rows": self.recorder.take(), "tokens": [list(o.outputs[0].token_ids) for o in outputs], "seconds": seconds,
            "counters": {k: after[k] - before[k] for k in after},
        }  # fmt: skip

    def touch_everything(self) -> None:
        """A routing to every expert of every layer, in decode steps of as many tokens as fit."""
        import torch

        device, k = self.experts.device, self.runtime.top_k
        for layer, source in self.store.layers.items():
            ids = torch.arange(-(-source.experts // k) * k, dtype=torch.int32).remainder(source.experts).view(-1, k)
            for part in ids.split(self.runtime.decode_tokens):
                x = torch.zeros(len(part), source.geometry.hidden, dtype=torch.bfloat16, device=device)
                self.runtime.forward(layer, x, torch.zeros(part.shape, device=device), part.to(device).contiguous())
        torch.cuda.synchronize()


def digest(rows: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def run_one(plan: Plan, pack: Path, out: Path, quick: bool) -> None:
    steps = QUICK if quick else DISK_STEPS if plan.disk else STEPS
    if plan.mtp:   # a step gives one token or two
        steps = {n: 2 * count for n, count in steps.items()}
    begun = time.perf_counter()
    engine = Engine(plan, pack, 16)
    result: dict[str, Any] = {
        "start_s": round(time.perf_counter() - begun, 1), "cudagraph_mode": engine.mode, "captured": engine.graphs, "arena": "all rows" if not plan.disk else f"{ARENA} %",
        "rows_bytes": engine.experts.rows_bytes, "passes": [],
    }  # fmt: skip
    print(f"{plan.name}: started in {result['start_s']} s, {engine.mode}, graphs of {engine.graphs} rows", flush=True)
    whole: dict[int, dict[str, Any]] = {}

    def one(coverage: str, state: str, requests: int) -> None:
        found = engine.generate(requests, steps[requests])
        reference = whole.setdefault(requests, found)
        rows, expected = found["rows"], reference["rows"]
        same = sum(a == b for a, b in zip(rows, expected, strict=False))
        hashes = [h for step in rows for h in step]
        result["passes"].append({
            "coverage": coverage, "slots": round(engine.runtime.coverage(), 4), "state": state, "requests": requests, "steps": len(rows), "same_steps": same,
            "same": rows == expected and found["tokens"] == reference["tokens"], "distinct": len(set(hashes)) / max(len(hashes), 1), "sha256": digest(rows),
            "seconds": round(found["seconds"], 3), "counters": found["counters"],
        })  # fmt: skip
        c, p = found["counters"], result["passes"][-1]
        print(
            f"{plan.name}: {coverage:8} {state:11} {requests:2} requests: {same} of {len(rows)} steps{'' if p['same'] else '  NOT THE SAME'}; {p['seconds']:.2f} s, "
            f"{c['misses'] + c['scan_misses']} misses, {c['fetched_bytes'] / 2**20:.0f} MiB, {c['arena_misses']} from disk", flush=True,
        )  # fmt: skip
        out.write_text(json.dumps(result, indent=1))

    engine.runtime.resize(0)
    engine.runtime.preload(None)
    for requests in steps:
        one("100 %", "resident", requests)
    one("100 %", "again", 4)
    result["tokens"] = {str(n): found["tokens"] for n, found in whole.items()}
    for coverage in COVERAGES:
        size = engine.bytes_of(coverage)
        for requests in steps:
            engine.runtime.resize(size)
            one(coverage, "cold", requests)
        for requests in (1, 4):
            one(coverage, "warm", requests)
        engine.touch_everything()
        one(coverage, "adversarial", max(steps))
    result["failures"] = engine.experts.words.count(engine.experts.rank)
    result["done"] = True
    out.write_text(json.dumps(result, indent=1))


def claims_of(results: dict[str, dict[str, Any]]) -> list[Claim]:
    compared = [p for r in results.values() for p in r.get("passes", []) if p["state"] != "resident"]
    total = sum(p["steps"] for p in compared)
    same = sum(p["same_steps"] for p in compared if p["same"])
    claims = [Claim("G1", "steps whose logits equal, byte for byte, those with every expert in a GPU slot; all runs", same, f"of {total}", max(total, 1), "==")]
    for name, result in results.items():
        passes = [p for p in result.get("passes", []) if p["state"] != "resident"]   # those are what the others are compared with
        steps = sum(p["steps"] for p in passes)
        what = f"{name}: steps whose logits equal, byte for byte, those of the run with every row in a slot"
        same = sum(p["same_steps"] for p in passes if p["same"])
        claims.append(Claim(f"G1.{name}", what, same, f"of {steps}", max(steps, 1), "=="))
        paged = sum(p["counters"]["misses"] for p in passes)
        claims.append(Claim(f"G1.{name}.paged", f"{name}: experts fetched into slots during those decode steps", paged, "rows", 1))
        if "disk" in name:
            read = sum(p["counters"]["arena_misses"] for p in passes)
            claims.append(Claim(f"G1.{name}.read", f"{name}: rows read from the disk for them", read, "rows", 1))
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu_identity.json")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--work", type=Path, help="folder for models and packs, on the disk to read from; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--seconds", type=float, default=240, help="a run that does not begin before this is named as skipped")
    parser.add_argument("--limit", type=float, default=150, help="seconds that one run may take")
    parser.add_argument("--parallel", type=int, default=3, help="engines at a time")
    parser.add_argument("--commit", default="", help="of the sources, where there is no git to ask")
    parser.add_argument("--one", help=argparse.SUPPRESS)   # RUN PACK OUT, in a process of its own
    parser.add_argument("--pack", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(RUNS[options.one], options.pack, options.out, options.quick)
        sys.stdout.flush()
        os._exit(0)   # vLLM's own end takes seconds, and there is nothing left to save
    report = Report(options.out / "gpu_identity.json", "base, bf16", options.seconds, options.commit)
    with tempfile.TemporaryDirectory(prefix="moet-identity-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        run_all(options, work, report)
    report.finish()
    if not all(c.held for c in report.claims):
        sys.exit(1)


def run_all(options: argparse.Namespace, work: Path, report: Report) -> None:
    """Several runs at a time: nothing here is a speed, and most of a run is vLLM's start."""
    packs = {}
    for model in dict.fromkeys(RUNS[name].model for name in options.runs):
        with report.timed(f"pack {model}"):
            packs[model] = make_pack(model, work)
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(options.parallel) as pool:
        waiting = [pool.submit(run_child, options, name, packs[RUNS[name].model], work, report) for name in options.runs]
        for future in as_completed(waiting):
            name, result = future.result()
            if result is None:
                continue
            results[name] = result
            if not result.get("done"):
                report.facts.setdefault("unfinished", []).append(name)
            in_order = {n: results[n] for n in options.runs if n in results}
            report.claims = claims_of(in_order)
            if report.facts.get("unfinished"):
                report.claims.append(Claim("G1.runs", "runs that did not end", len(report.facts["unfinished"]), "runs", 0, "=="))
            report.samples = {"runs": {n: {k: v for k, v in r.items() if k != "tokens"} for n, r in in_order.items()}, "mtp_text": mtp_text(results)}
            report.write()


def run_child(options: argparse.Namespace, name: str, pack: Path, work: Path, report: Report) -> tuple[str, dict[str, Any] | None]:
    """The run's result, also of one that was stopped; None if there was no time to begin it."""
    if not report.fits(name, 30):
        return name, None
    part = work / (name.replace("/", "-") + ".json")
    part.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", name, "--pack", str(pack), "--out", str(part), *(["--quick"] if options.quick else [])]
    log = work / f"{part.stem}.log"
    with report.timed(name):
        status = watched(command, options.limit, log)
    result = {**(json.loads(part.read_text()) if part.exists() else {}), "status": status}
    if not result.get("done"):
        report.say(f"{name}: did not end ({status}); its log: {log}")
    return name, result


def mtp_text(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Share of tokens that a model gave with MTP and without alike, up to the first that differs. MTP verifies in larger batches, whose sums vLLM orders otherwise: a near tie may fall
    the other way."""
    out = {}
    for name, plan in RUNS.items():
        plain = next((results[n] for n, p in RUNS.items() if p.model == plan.model and not p.mtp and "tokens" in results.get(n, {})), None)
        if plan.mtp and plain and "tokens" in results.get(name, {}):
            pairs = [(a, b) for n in plain["tokens"] for a, b in zip(plain["tokens"][n], results[name]["tokens"].get(n, []), strict=False)]
            total = sum(min(len(a), len(b)) for a, b in pairs)
            out[name] = round(sum(common(a, b) for a, b in pairs) / max(total, 1), 4)
    return out


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def watched(command: list[str], limit: float, log: Path) -> str:
    """Runs it; the lines of its own go to stdout, everything to the log; the end of the log too if it fails. "ok", or what went wrong."""
    environment = {**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as everything:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        name = command[command.index("--one") + 1]
        for line in process.stdout:
            everything.write(line)
            if line.startswith(name) or "moet:" in line:
                print("   ", line.rstrip()[-300:] if line.startswith(name) else f"{name}: {line.rstrip()[-250:]}", flush=True)
        code = process.wait()
        timer.cancel()
    if code == 0:
        return "ok"
    for line in log.read_text().splitlines()[-40:]:
        print("    |", line[-300:], flush=True)
    return "killed: out of time" if code == -9 else f"exit status {code}"


if __name__ == "__main__":
    main()
