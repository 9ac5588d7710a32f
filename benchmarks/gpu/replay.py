"""The alternative to paging: run the step with what is there, fetch all that was missing, run it again until nothing is. A baseline, to be measured against.

Same kernels and memory as the pager's. The host's choice of slots is timed and left out of a step's time: native code would take a hundredth of it.
"""

import ctypes
import time
from dataclasses import dataclass

import numpy as np
import torch
from arithmetic import Samples
from link import arena
from residency import Residency
from stack import SLEEP_CYCLES, Inputs, Stack

from moet.kernels.expert_mlp.cuda import MlpArgs
from moet.kernels.expert_mlp.launches import Size
from moet.kernels.paging.state import RESOLVE_THREADS, LookupArgs
from moet.moe.device import DeviceRuntime, LayerState


class LookupRuntime(DeviceRuntime):
    """`forward` as the pager's, but a row without a slot contributes zeros and is listed. Rows are those of the first class, the only one here."""

    def list_missing(self, rows: int) -> None:
        """Before capture: room for so many rows a step."""
        self.missing = torch.zeros(1 + rows, dtype=torch.int32, device=self.device)   # count, then rows
        self.tables.set_lookup_only(True)

    def begin(self, here: LayerState, args: MlpArgs, size: Size, stream: int) -> None:
        lookup = LookupArgs(layer=args.layer, list=self.missing.data_ptr(), capacity=len(self.missing) - 1)
        self.pager.launch("resolve_lookup", 1, RESOLVE_THREADS, lookup, stream=stream)
        here.kernels.quantize(args, size, stream)


@dataclass
class Replayed:
    """samples: as of a paged run; misses: all rows fetched in the step. runs: of the graph, a step. policy_s: seconds of the host's choice, a step, left out."""

    samples: Samples
    runs: list[int]
    policy_s: list[float]
    outputs: torch.Tensor


class Replay:
    """Steps of a captured stack over a LookupRuntime, of which `coverage` of the rows have a slot."""

    def __init__(self, runtime: LookupRuntime, stack: Stack, coverage: float, heat: np.ndarray) -> None:
        self.runtime, self.stack, self.coverage = runtime, stack, coverage
        (self.cls,), (self.arrays,), (given,) = runtime.store.classes, runtime.tables._arrays, runtime.slots
        self.cache = Residency(self.cls.rows, given.slots)
        self.host = arena(runtime.store)[0]
        self.pool = self.arrays.pool.view(-1, self.cls.slot_bytes)
        location = np.ctypeslib.as_array(ctypes.cast(self.cls.location, ctypes.POINTER(ctypes.c_uint64)), (self.cls.rows,))
        self.host_slot = (location & 0xFFFFFFFF).astype(np.int64) - 1
        runtime.list_missing(stack.shape.layers * min(stack.shape.experts, stack.tokens * stack.shape.top_k))
        self.list_host = torch.zeros_like(runtime.missing, device="cpu", pin_memory=True)
        self.ids_host = torch.zeros_like(stack.ids, device="cpu", pin_memory=True)
        self._first = torch.arange(stack.shape.layers, dtype=torch.int32).view(-1, 1, 1) * stack.shape.experts
        self._install(self.cache.preload(heat), np.arange(given.slots), np.empty(0, np.int32))
        self.graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The step; then the list and the routing to the host."""

        def after() -> None:
            self.list_host.copy_(self.runtime.missing, non_blocking=True)
            self.ids_host.copy_(self.stack.ids, non_blocking=True)
            self.runtime.missing[:1].zero_()

        return self.stack.capture(after)

    def _install(self, rows: np.ndarray, slots: np.ndarray, evicted: np.ndarray) -> None:
        """Copies rows into slots and updates the device's table, behind what the stream does already."""
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            self.pool[slot].copy_(self.host[self.host_slot[row]], non_blocking=True)
        a, device = self.arrays, self.runtime.device
        gone, came, at = (torch.from_numpy(np.ascontiguousarray(v, np.int64)).pin_memory().to(device, non_blocking=True) for v in (evicted, rows, slots))
        if len(evicted):
            a.slot_of[gone] = -1
        a.slot_of[came], a.row_of[at], a.valid[at] = at.int(), came.int(), 1

    def step(self, inputs: Inputs, number: int) -> tuple[float, int, int, float]:
        """(seconds, rows fetched, runs, seconds of the policy)."""
        self.cache.begin()
        self.stack.load(inputs, number)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        fetched = runs = 0
        policy_s = 0.0
        while True:
            self.graph.replay()
            end.record()
            end.synchronize()
            runs += 1
            count = int(self.list_host[0])
            if not count:
                break
            before = time.perf_counter()
            routed = np.unique((self.ids_host + self._first).numpy())
            missing = np.unique(self.list_host[1 : 1 + count].numpy())
            slots, evicted = self.cache.place(missing, routed[self.cache.slot_of[routed] >= 0])
            policy_s += time.perf_counter() - before
            self._install(missing, slots, evicted)
            fetched += len(missing)
        self.cache.touch(np.unique((self.ids_host + self._first).numpy()))   # beside the timing: the step has ended
        return start.elapsed_time(end) / 1e3 - policy_s, fetched, runs, policy_s

    def run(self, inputs: Inputs, steps: range, timed: range) -> Replayed:
        """Steps of the inputs in order; those of `timed` are its samples."""
        done, outputs = [], []
        for number in steps:
            found = self.step(inputs, number)
            if number in timed:
                done.append(found)
                outputs.append(self.stack.out.to("cpu", copy=True))
        seconds, fetched, runs, policy_s = (list(v) for v in zip(*done, strict=True))
        name = "trace" if self.stack.router is None else "router"
        moved = tuple(f * self.cls.slot_bytes for f in fetched)
        samples = Samples(self.coverage, self.stack.tokens, name, tuple(seconds), tuple(fetched), moved)
        return Replayed(samples, runs, policy_s, torch.stack(outputs))
