"""The `moet:` group of /metrics: read from the counter blocks that workers map into the run folder, when Prometheus asks."""

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from moet.engine.vllm.run import Run
from moet.errors import StoreError
from moet.store import counters

COUNTERS = {  # name without moet: and _total -> (help, words of the block with the labels that tell them apart)
    "expert_hits": ("Experts of a layer that were in the arena when asked for", {"hits": {}}),
    "expert_misses": ("Experts of a layer that had to be read", {"misses": {}}),
    "scan_hits": ("The part of expert_hits that prefills asked for", {"scan_hits": {}}),
    "scan_misses": ("The part of expert_misses that prefills asked for", {"scan_misses": {}}),
    "expert_evictions": ("Rows that lost their arena slot", {"evictions": {}}),
    "expert_admissions": ("Rows that moved from staging into the working set", {"admitted": {}}),
    "extra_waves": ("Waves beyond the first of a layer", {"waves": {}}),
    "layers": ("MoE layers computed", {"layers": {}}),
    "disk_read_bytes": ("Bytes read from row files", {"bytes_direct": {"path": "direct"}, "bytes_buffered": {"path": "buffered"}}),
    "disk_read_rows": ("Rows read from row files", {"rows_direct": {"path": "direct"}, "rows_buffered": {"path": "buffered"}}),
    "preheated_rows": ("Rows read at start because they were hot last time", {"rows_preheated": {}}),
    "checksum_failures": ("Rows that did not match their checksums", {"checksum_failures": {}}),
    "io_errors": ("Rows that the system could not read", {"io_errors": {}}),
}
DEVICE_COUNTERS = {  # of a GPU: name -> (help, key in the file that moet.engine.vllm.watch writes, what to multiply it by)
    "gpu_expert_hits": ("Experts of a layer that had a GPU slot when asked for", "hits", 1),
    "gpu_expert_misses": ("Experts of a layer that had to be fetched into a GPU slot", "misses", 1),
    "gpu_scan_hits": ("Experts of a prefill's layer that had a GPU slot", "scan_hits", 1),
    "gpu_scan_misses": ("Experts of a prefill's layer that streamed through the ring", "scan_misses", 1),
    "gpu_fetched_rows": ("Rows copied to the GPU", "fetched_rows", 1),
    "gpu_fetched_bytes": ("Bytes copied to the GPU", "fetched_bytes", 1),
    "gpu_arena_misses": ("Rows that were not in RAM when the GPU fetched them, and had to be read first", "arena_misses", 1),
    "gpu_torn_copies": ("Copies repeated because the row lost its arena slot meanwhile", "torn_copies", 1),
    "gpu_failed_rows": ("Rows that the GPU did not get", "failed_rows", 1),
    "gpu_timeouts": ("Waits that ended after moet.wait_limit_s without progress", "timeouts", 1),
    "gpu_extra_waves": ("Waves beyond the first of a layer", "waves", 1),
    "gpu_layers": ("MoE layers computed", "layers", 1),
    "gpu_steps": ("Steps computed, a drafter's own included", "steps", 1),
    "gpu_fetch_seconds": ("Time from a layer's first fetched byte to its last", "fetch_nanoseconds", 1e-9),
    "gpu_stall_seconds": ("Time that a layer's matrix product waited for rows, its longest block", "stall_nanoseconds", 1e-9),
}
GAUGES = {
    "arena_mapped_bytes": ("Bytes mapped for expert rows", "arena_bytes"),
    "arena_slots": ("Slots of the arena", "arena_slots"),
    "arena_slots_valid": ("Slots that hold a row", "slots_valid"),
    "arena_slots_pinned": ("Slots in use by the running layer", "slots_pinned"),
    "rows": ("Rows that the arena stands for", "rows_total"),
    "rows_bytes": ("Bytes of those rows on disk, this rank's slices", "bytes_total"),
}


def install() -> None:
    """Adds the collector to what this process shows. Several API servers show the sum of their files, in a registry made anew for each request, so
    there the collector joins the one that reads these files."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        REGISTRY.register(MoetCollector())
        return
    original = MultiProcessCollector.collect

    @functools.wraps(original)
    def collect(self: MultiProcessCollector) -> Iterator[Metric]:
        yield from original(self)
        yield from MoetCollector().collect()

    MultiProcessCollector.collect = collect


class MoetCollector(Collector):
    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        from moet.engine.vllm.entry import RUNS

        ranks = [rank for run in RUNS[-1:] for rank in read(run)]
        if not ranks:
            return
        info = GaugeMetricFamily("moet:info", "What the experts are", labels=["precision", "activations", "source", "fingerprint", "row_format", "scheme"])
        run, first = RUNS[-1], ranks[0]["info"]
        info.add_metric(
            [run.settings.precision, first["activations"], "pack" if run.packed else "checkpoint", *(first[x] for x in ("fingerprint", "row_format", "scheme"))], 1
        )
        yield info
        for name, (text, words) in COUNTERS.items():
            labels = sorted({label for found in words.values() for label in found})
            family = CounterMetricFamily(f"moet:{name}", text, labels=["rank", *labels])
            for rank in ranks:
                for word, found in words.items():
                    family.add_metric([rank["rank"], *(found[label] for label in labels)], rank["words"][word])
            yield family
        for name, (text, word) in GAUGES.items():
            yield gauge(name, text, {rank["rank"]: rank["words"][word] for rank in ranks})
        yield gauge("arena_budget_bytes", "What the arena may map", {rank["rank"]: rank["info"]["budget_bytes"] or rank["words"]["arena_bytes"] for rank in ranks})
        yield from device(ranks)
        wait = CounterMetricFamily("moet:read_wait_seconds", "Time that layers waited for rows", labels=["rank"])
        latency = HistogramMetricFamily("moet:read_latency_seconds", "From a row's first read to its last byte", labels=["rank"])
        for rank in ranks:
            wait.add_metric([rank["rank"]], rank["words"]["wait_us"] / 1e6)
            latency.add_metric([rank["rank"]], buckets(rank["latency"]), sum_value=None)  # the block has no sum; then no _count is written either
            latency.add_sample("moet:read_latency_seconds_count", {"rank": rank["rank"]}, sum(rank["latency"]))
        yield wait
        yield latency


def device(ranks: list[dict[str, Any]]) -> Iterator[Metric]:
    """What GPUs add, of the ranks that have one and are past their start."""
    found = [rank for rank in ranks if rank["device"] is not None]
    if not found:
        return
    for name, (text, key, scale) in DEVICE_COUNTERS.items():
        family = CounterMetricFamily(f"moet:{name}", text, labels=["rank"])
        for rank in found:
            family.add_metric([rank["rank"]], rank["device"][key] * scale)
        yield family
    yield gauge("gpu_slot_bytes", "GPU memory for expert slots", {rank["rank"]: rank["info"]["gpu_slot_bytes"] for rank in found})
    yield gauge("gpu_coverage", "Part of the experts' rows that have a GPU slot at once", {rank["rank"]: rank["info"]["gpu_coverage"] for rank in found})


def gauge(name: str, text: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"moet:{name}", text, labels=["rank"])
    for rank, value in values.items():
        family.add_metric([rank], value)
    return family


def buckets(latency: tuple[int, ...]) -> list[tuple[str, float]]:
    """Bucket b counts latencies in [2^b, 2^(b+1)) microseconds; Prometheus wants cumulative counts by upper bound in seconds."""
    out, total = [], 0
    for b, count in enumerate(latency[:-1]):
        total += count
        out.append((str(2 ** (b + 1) / 1e6), total))
    return [*out, ("+Inf", total + latency[-1])]


def read(run: Run) -> list[dict[str, Any]]:
    """One dict per rank that has started: its number, its info (moet.engine.vllm.experts writes it), its counter words, its latency histogram. None of a rank whose files
    are gone: the run ends, or its folder was cleaned."""
    out = []
    for path in sorted(Path(run.run_dir).glob("rank-*.json"), key=lambda p: int(p.stem.removeprefix("rank-"))):
        rank = path.stem.removeprefix("rank-")
        there = run.device_counters_path(int(rank))
        try:
            info, block = json.loads(path.read_text()), counters.read(run.counters_path(int(rank)))
            device = json.loads(there.read_text()) if there.exists() else None
        except (StoreError, FileNotFoundError):
            continue
        out.append({"rank": rank, "info": info, "words": block.as_dict(), "latency": block.latency, "device": device})
    return out
