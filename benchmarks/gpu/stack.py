"""Expert layers one after the other, as a model has them: norm, router, experts, residual; no attention. One CUDA graph holds a whole step."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import routing
import torch
from arithmetic import Samples
from rows import Shape

ROUTED_SCALE = 2.5
"""Of the routing weights' sum. A layer's result is then about 0.16 of the residual it joins."""
SLEEP_CYCLES = 1_500_000
"""The GPU idles so long (0.8 ms) before a timed step, so that the launch of its graph is not part of the time."""


@dataclass
class Inputs:
    """What differs from step to step. hidden: bf16 [steps, tokens, hidden], correlated as the trace is; ids: int32 [steps, layers, tokens, top_k], the trace."""

    hidden: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, steps: int, tokens: int, device: torch.device, seed: int = 0) -> "Inputs":
        generator = torch.Generator(device).manual_seed(seed + 1000 * tokens)
        hidden = torch.randn((steps, tokens, shape.hidden), device=device, generator=generator)
        fresh = (1 - routing.MEMORY**2) ** 0.5
        for step in range(1, steps):
            hidden[step] = routing.MEMORY * hidden[step - 1] + fresh * hidden[step]
        ids = routing.trace(steps, shape.layers, tokens, shape.experts, shape.top_k, seed, threads=8)
        return cls(hidden.bfloat16(), torch.from_numpy(ids).to(device))


class Router:
    """Per layer: logits = gate @ x + bias, standard normal plus the popularity's bias. It chooses where a layer's experts come from: the states before it."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.top_k = shape.top_k
        self.gates = [
            (torch.randn((shape.experts, shape.hidden), device=device, generator=generator) / shape.hidden**0.5).bfloat16() for _ in range(shape.layers)
        ]
        self.biases = [torch.from_numpy(routing.bias(layer, shape.experts, seed)).to(device) for layer in range(shape.layers)]

    def __call__(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x, self.gates[layer]).float() + self.biases[layer]
        values, ids = torch.topk(logits, self.top_k, dim=-1, sorted=True)
        return torch.softmax(values, dim=-1) * ROUTED_SCALE, ids.int()


class Stack:
    """`experts(layer, x, weights, ids)` computes a layer's routed experts. Static tensors: `x` is the step's input, `ids` what was routed (with `router` None: the
    trace, an input), `out` the last state."""

    def __init__(self, shape: Shape, experts: Callable[..., torch.Tensor], tokens: int, device: torch.device, router: Router | None) -> None:
        self.shape, self.experts, self.tokens, self.router = shape, experts, tokens, router
        self.x = torch.zeros((tokens, shape.hidden), dtype=torch.bfloat16, device=device)
        self.ids = torch.zeros((shape.layers, tokens, shape.top_k), dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.x)
        self._weights = torch.full((tokens, shape.top_k), ROUTED_SCALE / shape.top_k, device=device)
        self._norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)

    def step(self) -> None:
        state = self.x
        for layer in range(self.shape.layers):
            x = torch.nn.functional.rms_norm(state, (self.shape.hidden,), self._norm, 1e-6)
            weights, ids = self._weights, self.ids[layer]
            if self.router is not None:
                weights, ids = self.router(layer, x)
                self.ids[layer].copy_(ids)
            state = state + self.experts(layer, x, weights, ids)
        self.out.copy_(state)

    def capture(self, after: Callable[[], None] | None = None) -> torch.cuda.CUDAGraph:
        """The graph of a step; `after` adds to its end. Whoever calls has made sure that nothing pages meanwhile."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
            if after:
                after()
        return graph

    def load(self, inputs: Inputs, step: int) -> None:
        self.x.copy_(inputs.hidden[step], non_blocking=True)
        if self.router is None:
            self.ids.copy_(inputs.ids[step], non_blocking=True)


@dataclass
class Run:
    """Timed steps. outputs: the last state of each, bf16 [steps, tokens, hidden] on the CPU; ids: of all steps, if they were kept; per_s: tokens a second of steps
    that followed each other without a pause; launch_ms: median time that the CPU takes to launch a step; counters: over the timed steps."""

    samples: Samples
    outputs: torch.Tensor
    ids: np.ndarray
    per_s: float
    launch_ms: float
    counters: dict[str, int]


def timed_steps(
    stack: Stack, graph: torch.cuda.CUDAGraph, runtime, inputs: Inputs, parts: tuple[int, int, int], coverage: float, *, keep_ids: bool = False,
    each: Callable[[], None] = lambda: None,
) -> Run:  # fmt: skip
    """Replays the steps of `inputs`: parts[0] to warm the cache, parts[1] timed one by one with device events, parts[2] without a pause between them.
    `each` is called before the first timed step and after every one of the first two kinds."""
    warm_up, timed, together = parts
    ids: list[np.ndarray] = []
    for step in range(warm_up):
        stack.load(inputs, step)
        graph.replay()
        if keep_ids:
            ids.append(stack.ids.to("cpu", copy=True).numpy())
        each()
    torch.cuda.synchronize()
    seconds, launches, misses, moved, outputs = [], [], [], [], []
    first = before = runtime.counters()
    each()
    for step in range(warm_up, warm_up + timed):
        stack.load(inputs, step)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        launch = time.perf_counter()
        graph.replay()
        launches.append(time.perf_counter() - launch)
        end.record()
        end.synchronize()
        after = runtime.counters()
        each()
        seconds.append(start.elapsed_time(end) / 1e3)
        misses.append(after.misses - before.misses)
        moved.append(after.fetched_bytes - before.fetched_bytes)
        outputs.append(stack.out.to("cpu", copy=True))
        if keep_ids:
            ids.append(stack.ids.to("cpu", copy=True).numpy())
        before = after
    counters = {name: value - getattr(first, name) for name, value in asdict(before).items()}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for step in range(warm_up + timed, warm_up + timed + together):
        stack.load(inputs, step)
        graph.replay()
    end.record()
    end.synchronize()
    per_s = stack.tokens * together / (start.elapsed_time(end) / 1e3)
    samples = Samples(coverage, stack.tokens, "trace" if stack.router is None else "router", tuple(seconds), tuple(misses), tuple(moved))
    return Run(samples, torch.stack(outputs), np.stack(ids) if ids else np.empty(0), per_s, 1e3 * statistics.median(launches), counters)


def spread(seconds: tuple[float, ...]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile, in ms."""
    cuts = statistics.quantiles(seconds, n=10)
    return {"median_ms": 1e3 * statistics.median(seconds), "p10_ms": 1e3 * cuts[0], "p90_ms": 1e3 * cuts[-1]}
