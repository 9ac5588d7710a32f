"""Claim G5: a prefill of 8192 tokens through DeepSeek-V4-Flash's expert layers at 20 % coverage, absent rows streaming through the ring, against the larger of the
time of the same call with every row resident and the bytes at the link's rate.

    python benchmarks/gpu/prefill.py --out FOLDER      alone, about 100 s, most of it to fill 72.6 GiB; scale.py --also-prefill fills them once for both
"""

import statistics
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import arithmetic
import link
import routing
import torch
from model import gpu_bytes, open_store, runtime_over
from report import Report, arguments
from rows import TINY, V4_FLASH, Shape
from stack import ROUTED_SCALE

TOKENS, COVERAGE, REPEATS = 8192, 0.2, 3


def batch(shape: Shape, device: torch.device, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights, ids [layers, tokens, top_k]: each token is a stream of its own, so its routing is a draw from each layer's popularity."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn((tokens, shape.hidden), device=device, generator=generator).bfloat16()
    ids = torch.from_numpy(routing.trace(1, shape.layers, tokens, shape.experts, shape.top_k, seed=0, threads=8)[0]).to(device)
    return x, torch.full((tokens, shape.top_k), ROUTED_SCALE / shape.top_k, device=device), ids


def timed(runtime, shape: Shape, device: torch.device, tokens: int, report: Report, name: str) -> dict[str, object]:
    """Seconds of REPEATS passes through all layers after one that warms up, bytes fetched and rows hit and missed of each, and the last state."""
    x, weights, ids = batch(shape, device, tokens)
    norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
    found: dict[str, object] = {"seconds": [], "bytes": [], "scan_hits": [], "scan_misses": []}
    for repeat in range(1 + REPEATS):
        before, state = runtime.counters(), x
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for layer in range(shape.layers):
            normed = torch.nn.functional.rms_norm(state, (shape.hidden,), norm, 1e-6)
            state = state + runtime.forward(layer, normed, weights, ids[layer], None, True)
        end.record()
        end.synchronize()
        after = runtime.counters()
        if repeat:
            found["seconds"].append(round(start.elapsed_time(end) / 1e3, 6))
            found["bytes"].append(after.fetched_bytes - before.fetched_bytes)
            found["scan_hits"].append(after.scan_hits - before.scan_hits)
            found["scan_misses"].append(after.scan_misses - before.scan_misses)
    report.samples[name] = dict(found)
    report.say(name, found)
    return found | {"state": state.cpu()}


def resident(runtime, shape: Shape, device: torch.device, report: Report, tokens: int) -> dict[str, object]:
    """With every row in a slot: GEMM time."""
    runtime.preload()
    runtime.arm(True)
    found = timed(runtime, shape, device, tokens, report, "resident")
    report.write()
    return found


def paged(
    runtime, shape: Shape, device: torch.device, report: Report, tokens: int, coverage: float, slot_bytes: int, bytes_per_s: float, whole: dict[str, object]
) -> None:
    """The claim. slot_bytes: of the slots for `coverage`; whole: what `resident` found."""
    runtime.resize(slot_bytes)
    runtime.preload()
    runtime.arm(True)
    found = timed(runtime, shape, device, tokens, report, f"{100 * coverage:g} %")
    seconds, gemm_s = statistics.median(found["seconds"]), statistics.median(whole["seconds"])
    moved = int(statistics.median(found["bytes"]))
    report.facts["prefill"] = arithmetic.rounded({
        "tokens": tokens, "coverage": runtime.coverage(), "seconds": seconds, "gemm_s": gemm_s, "transfer_s": moved / bytes_per_s, "gb": moved / 1e9,
        "gb_per_s": moved / seconds / 1e9, "link_gb_per_s": bytes_per_s / 1e9, "tok_per_s": tokens / seconds,
    })  # fmt: skip
    report.claims = [arithmetic.prefill_claim(seconds, gemm_s, moved, bytes_per_s, tokens, coverage), arithmetic.same_bits_claim(
        "G5.bits", "prefill at 20 % coverage: values of the last state that differ from the resident run's", int((found["state"] != whole["state"]).sum())
    )]  # fmt: skip
    report.write()


def main() -> None:
    options = arguments(__doc__, 150).parse_args()
    shape = Shape(**{**vars(TINY if options.tiny else V4_FLASH), "format": options.format})
    device, tokens = torch.device("cuda"), 300 if options.tiny else TOKENS
    report = Report(options.out / "gpu_prefill.json", f"base, bf16, {options.format} rows", options.seconds, options.commit)
    with open_store(shape, report, device) as store:
        report.facts["link"] = link.measure(store, device)
        with runtime_over(store, shape, device, decode_tokens=16, max_tokens=tokens) as runtime:
            whole = resident(runtime, shape, device, report, tokens)
        with runtime_over(store, shape, device, decode_tokens=1, max_tokens=tokens, coverage=COVERAGE) as runtime:
            paged(runtime, shape, device, report, tokens, COVERAGE, gpu_bytes(store, COVERAGE), report.facts["link"]["bytes_per_s"], whole)
    report.finish()


if __name__ == "__main__":
    main()
