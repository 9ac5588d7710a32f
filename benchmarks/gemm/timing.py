"""One cell of the table: the calls of a replay captured as one CUDA graph, and its replays timed."""

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from gemm.column import Column
from gemm.inputs import Inputs

SAMPLES = 25
SLEEP_CYCLES = 1_500_000
"""The GPU idles so long (0.8 ms) before a timed replay, so that the host's launch of it is not part of the time."""
Call = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Times:
    """Seconds of one call: a replay's time over its calls; one for each replay."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Tenth and ninetieth percentile."""
        cuts = statistics.quantiles(self.seconds, n=10)
        return cuts[0], cuts[-1]


def run_all(call: Call, copies: int, inputs: Inputs) -> None:
    for c in range(inputs.calls):
        call(c % copies, inputs.x[c], inputs.weights[c], inputs.ids[c])


def warm_up(column: Column, batches: list[Inputs]) -> None:
    """First calls of all batches; side by side where they compile. Others stay in this thread, whose CUDA context launches through the driver need."""
    first = lambda b: column(0, b.x[0], b.weights[0], b.ids[0])
    if column.compiles:
        with ThreadPoolExecutor(len(batches)) as pool:
            list(pool.map(first, batches))
    else:
        for batch in batches:
            first(batch)
    if batches[0].x.is_cuda:
        torch.cuda.synchronize()


def capture(call: Call, copies: int, inputs: Inputs) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_all(call, copies, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(call, copies, inputs)
    return graph


def replays(graph: torch.cuda.CUDAGraph, calls: int, samples: int = SAMPLES) -> Times:
    """After two that are not timed."""
    found = []
    for _ in range(samples + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / calls)
    return Times(tuple(found[2:]))


def timed(call: Call, copies: int, inputs: Inputs, samples: int = SAMPLES) -> Times:
    return replays(capture(call, copies, inputs), inputs.calls, samples)
