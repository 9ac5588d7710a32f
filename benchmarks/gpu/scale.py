"""Claims G2 and G3: decode steps of DeepSeek-V4-Flash's expert layers (43 x 256 experts, 72.6 GiB of 2-bit rows in pinned RAM) through the pager, at several
coverages, against the resident step plus the missed bytes at the link's rate; and against the replay baseline.

    python benchmarks/gpu/scale.py --out FOLDER        about 4 minutes on an H200 with 128 GiB of RAM; --also-prefill measures claim G5 in the same process
"""

import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import arithmetic
import link
import numpy as np
import prefill
import record
import replay
import routing
import torch
from model import gpu_bytes, heat_of, open_store, runtime_over
from report import Report, arguments
from rows import TINY, V4_FLASH, Shape
from stack import Inputs, Router, Run, Stack, spread, timed_steps

SMALL = (0.2, 0.15, 0.1, 0.05)   # within 32 GB
REPLAYED = (0.2, 0.15)
MEMORY = 32e9
BATCHES = {1: (300, 120, 80), 4: (200, 120, 40), 16: (60, 30, 10), 64: (30, 12, 4)}
"""Tokens a step -> steps that warm the cache, steps timed one by one, steps timed together."""
BATCH_COVERAGES = {4: (0.2, 0.1), 16: (0.2,), 64: (0.2,)}
DECODE_TOKENS = 64
"""Of every runtime: as a server for up to 64 streams has it, whatever batch runs."""


class Scale:
    """Everything measured so far, by (routing, tokens): inputs, the resident run's outputs and the heat of its warm-up."""

    def __init__(self, shape: Shape, report: Report, device: torch.device, store, tiny: bool) -> None:
        self.shape, self.report, self.device, self.store = shape, report, device, store
        self.batches = {t: (6, 4, 2) for t in (1, 4)} if tiny else BATCHES
        self.inputs: dict[int, Inputs] = {}
        self.heat: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        self.resident: dict[tuple[str, int], Run] = {}
        self.paged: list[Run] = []
        self.slots: dict[str, dict[str, float]] = {}   # as they came out
        self.replayed: list[replay.Replayed] = []
        self.router = Router(shape, device)
        self.link = link.measure(store, device)
        report.facts["link"] = self.link
        report.say("link:", self.link)

    def inputs_of(self, tokens: int) -> Inputs:
        if tokens not in self.inputs:
            self.inputs[tokens] = Inputs.make(self.shape, sum(self.batches[tokens]), tokens, self.device)
        return self.inputs[tokens]

    def measure(self, runtime, kind: str, tokens: int, coverages: tuple[float, ...]) -> None:
        """Captures one graph and runs it at each coverage; the first run of a configuration is the resident one."""
        inputs, warm_up = self.inputs_of(tokens), self.batches[tokens][0]
        stack = Stack(self.shape, runtime.forward, tokens, self.device, self.router if kind == "router" else None)
        runtime.arm(False)
        graph = stack.capture()
        runtime.arm(True)
        for coverage in coverages:
            if coverage < 1:
                runtime.resize(gpu_bytes(self.store, coverage))
            runtime.preload(self.heat.get((kind, tokens)))
            runtime.arm(True)
            run = timed_steps(stack, graph, runtime, inputs, self.batches[tokens], coverage, keep_ids=coverage == 1)
            self.slots[run.samples.name] = {"coverage": runtime.coverage(), "slots": runtime.slots[0].slots, "staging": runtime.slots[0].staging}
            if coverage == 1:
                self.resident[kind, tokens] = run
                self.heat[kind, tokens] = heat_of(run.ids[:warm_up], self.shape.experts)
                self.report.facts.setdefault("locality", {})[f"{kind} x{tokens}"] = arithmetic.rounded(routing.locality(run.ids, self.shape.experts))
            else:
                self.paged.append(run)
            self.record(run)
        del graph

    def replay(self, kind: str, tokens: int, coverage: float) -> None:
        warm_up, timed, _ = self.batches[tokens]
        steps = range(warm_up // 2, warm_up + timed)   # preloaded like the pager, and slower: half the warm-up
        flat = np.concatenate([self.heat[kind, tokens][layer] for layer in range(self.shape.layers)])
        options = {"decode_tokens": DECODE_TOKENS, "coverage": coverage, "kind": replay.LookupRuntime}
        with runtime_over(self.store, self.shape, self.device, **options) as runtime:
            stack = Stack(self.shape, runtime.forward, tokens, self.device, self.router if kind == "router" else None)
            baseline = replay.Replay(runtime, stack, coverage, flat)
            runtime.arm(True)
            try:
                found = baseline.run(self.inputs_of(tokens), steps, range(warm_up, warm_up + timed))
            except ValueError as error:   # a step needs more rows than there are slots
                self.report.facts.setdefault("replay_impossible", {})[f"{kind} x{tokens} {coverage}"] = str(error)
                self.report.say(error)
                return
        self.replayed.append(found)
        name = f"replay {found.samples.name}"
        same = [torch.equal(a, b) for a, b in zip(found.outputs, self.resident[kind, tokens].outputs, strict=True)]
        self.report.samples[name] = {
            "seconds": [round(s, 7) for s in found.samples.seconds], "fetched_rows": list(found.samples.misses), "runs": found.runs,
            "policy_s": [round(s, 7) for s in found.policy_s], "steps_equal": sum(same),
        }  # fmt: skip
        self.report.facts.setdefault("replay", {})[found.samples.name] = arithmetic.rounded({
            "step_ms": 1e3 * statistics.median(found.samples.seconds), "runs": statistics.mean(found.runs),
            "fetched_rows": statistics.mean(found.samples.misses), "policy_ms_left_out": 1e3 * statistics.mean(found.policy_s),
        })  # fmt: skip
        self.report.say(name, self.report.facts["replay"][found.samples.name], f"equal {sum(same)} of {len(same)}")
        self.claims()

    def record(self, run: Run) -> None:
        """Puts a run into the report: samples, numbers, whether its outputs are the resident run's."""
        steps, facts = run.samples, self.report.facts
        whole = self.resident.get((steps.routing, steps.tokens))
        row = {**spread(steps.seconds), **self.slots[steps.name], "tok_per_s_back_to_back": run.per_s, "launch_ms": run.launch_ms}
        if run.counters["fetch_nanoseconds"]:
            row["fetch_gb_per_s"] = run.counters["fetched_bytes"] / run.counters["fetch_nanoseconds"]   # from a layer's first missing row to its last
        if whole is not None:
            resident_s = statistics.median(whole.samples.seconds)
            row |= arithmetic.summary(steps, resident_s, self.link["bytes_per_s"])
            row["steps_equal"] = float(sum(torch.equal(a, b) for a, b in zip(run.outputs, whole.outputs, strict=True)))
        facts.setdefault("steps", {})[steps.name] = arithmetic.rounded(row)
        self.report.samples[steps.name] = {
            "seconds": [round(s, 7) for s in steps.seconds], "missed_rows": list(steps.misses), "bytes": list(steps.bytes), "counters": run.counters,
        }  # fmt: skip
        self.report.say(steps.name, facts["steps"][steps.name])
        self.claims()

    def claims(self) -> None:
        """All claims from all that was measured so far, and the file."""
        resident = {key: statistics.median(run.samples.seconds) for key, run in self.resident.items()}
        paged = [run.samples for run in self.paged]
        claims = arithmetic.scale_claims(paged, resident, self.link["bytes_per_s"]) + arithmetic.replay_claims(paged, [r.samples for r in self.replayed])
        compared = [(run, self.resident[run.samples.routing, run.samples.tokens]) for run in self.paged if (run.samples.routing, run.samples.tokens) in self.resident]
        if compared:
            steps = sum(len(run.outputs) for run, _ in compared)
            differ = steps - sum(torch.equal(a, b) for run, whole in compared for a, b in zip(run.outputs, whole.outputs, strict=True))
            what = f"V4-Flash's experts: paged steps whose last state differs from the resident run's, of {steps}"
            claims.append(record.Claim("G2.bits", what, differ, "", 0, "=="))
        if memory := self.report.facts.get("gpu_bytes_at_20_percent"):
            claims.append(record.Claim("G2.memory", "GPU memory in use at 20 % coverage, everything counted", round(memory / 1e9, 2), "GB", MEMORY / 1e9, "<="))
        self.report.claims = claims
        self.report.write()


def used_bytes() -> int:
    """Of the GPU's memory, by everything: the context, kernels, slots, scratch."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def resident(scale: Scale, prefill_report: Report | None, scan_tokens: int) -> dict[str, object]:
    """Steps with every row in a slot, and at 50 %; returns the prefill's times."""
    found: dict[str, object] = {}
    with runtime_over(scale.store, scale.shape, scale.device, decode_tokens=DECODE_TOKENS, max_tokens=scan_tokens, least=0.5) as runtime:
        for kind in ("trace", "router"):
            scale.measure(runtime, kind, 1, (1.0,))
        for tokens in list(scale.batches)[1:]:
            if scale.report.fits(f"resident x{tokens}", 5):
                scale.measure(runtime, "trace", tokens, (1.0,))
        if prefill_report:
            found = prefill.resident(runtime, scale.shape, scale.device, prefill_report, scan_tokens)
        for kind in ("trace", "router"):
            scale.measure(runtime, kind, 1, (0.5,))
    return found


def paged(scale: Scale, tokens: int, prefill_report: Report | None, scan_tokens: int, whole: dict[str, object]) -> None:
    """Steps of a batch at all its coverages, and the prefill at the first of them."""
    kinds = [kind for kind in ("trace", "router") if (kind, tokens) in scale.resident]
    coverages = SMALL if tokens == 1 else BATCH_COVERAGES.get(tokens, SMALL[:1])
    if not kinds or not scale.report.fits(f"x{tokens}", 6 * len(coverages) * len(kinds)):
        return
    options = {"decode_tokens": DECODE_TOKENS, "coverage": coverages[0], "least": coverages[-1], "max_tokens": scan_tokens if prefill_report else 0}
    with runtime_over(scale.store, scale.shape, scale.device, **options) as runtime:
        for kind in kinds:
            scale.measure(runtime, kind, tokens, coverages)
        if prefill_report:
            size, rate = gpu_bytes(scale.store, coverages[0]), scale.link["bytes_per_s"]
            prefill.paged(runtime, scale.shape, scale.device, prefill_report, scan_tokens, coverages[0], size, rate, whole)
        if tokens == 1:
            scale.report.facts["gpu_bytes_at_20_percent"] = used_bytes()


def measure(scale: Scale, prefill_report: Report | None, tokens_of_prefill: int) -> None:
    scan_tokens = tokens_of_prefill if prefill_report else 0
    whole = resident(scale, prefill_report, scan_tokens)
    for tokens in scale.batches:
        paged(scale, tokens, prefill_report if tokens == 1 else None, scan_tokens, whole)
        for kind in ("trace", "router") if tokens == 1 else ():
            for coverage in REPLAYED:
                if scale.report.fits(f"replay {kind} {coverage}", 8):
                    scale.replay(kind, tokens, coverage)


def main() -> None:
    parser = arguments(__doc__, 240)
    parser.add_argument("--also-prefill", action="store_true", help="claim G5 too, into gpu_prefill.json")
    options = parser.parse_args()
    shape = Shape(**{**vars(TINY if options.tiny else V4_FLASH), "format": options.format})
    device, mode = torch.device("cuda"), f"base, bf16, {options.format} rows"
    report = Report(options.out / "gpu_scale.json", mode, options.seconds, options.commit)
    prefill_report = Report(options.out / "gpu_prefill.json", mode, options.seconds, options.commit) if options.also_prefill else None
    with open_store(shape, report, device) as store:
        scale = Scale(shape, report, device, store, options.tiny)
        measure(scale, prefill_report, prefill.TOKENS if not options.tiny else 40)
    scale.claims()
    report.finish()
    if prefill_report:
        prefill_report.finish()


if __name__ == "__main__":
    main()
