"""Prefill: rows that have no slot stream through a ring beside the GEMMs, layer L + 1 while layer L computes. The bookkeeping of decoding is not touched."""

import ctypes
from typing import TYPE_CHECKING

import torch

from moet.kernels.expert_mlp.cuda import MlpArgs
from moet.kernels.paging.state import RESOLVE_THREADS, Absent, ScanArgs

if TYPE_CHECKING:
    from moet.moe.device import DeviceRuntime, LayerState

FETCH_THREADS = 512
AHEAD = 2
"""Pairs an expert from which on a layer's absent rows stream before its routing is known: e^-2, 14 %, of them would not have been needed if routing were uniform."""

class Streams:
    """Two streams and the marks between them: `fetched` and `freed` of each half of the ring, and of the list that a scan works from."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The copies' few blocks go before the GEMMs' many, whenever one of those ends.
        self.side = torch.cuda.Stream(device, priority=-1)
        self.events = {name: torch.cuda.Event() for name in ("fetched 0", "fetched 1", "freed 0", "freed 1", "list", "resolved")}

    def main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def mark(self, name: str, on_side: bool) -> None:
        self.events[name].record(self.side if on_side else self.main())

    def wait(self, name: str, on_side: bool) -> None:
        (self.side if on_side else self.main()).wait_event(self.events[name])

    def join(self) -> None:
        """The main stream waits for all copies. Not while it is captured: what a graph waits for has to be in it."""
        if not torch.cuda.is_current_stream_capturing():
            self.wait("fetched 0", on_side=False)
            self.wait("fetched 1", on_side=False)

    def handle(self, on_side: bool) -> int:
        return (self.side if on_side else self.main()).cuda_stream


class OneStream:
    """The same where everything runs in the order in which it is asked for."""

    def mark(self, name: str, on_side: bool) -> None: ...
    def wait(self, name: str, on_side: bool) -> None: ...
    def join(self) -> None: ...
    def handle(self, on_side: bool) -> int:
        return 0


class Scan:
    """One layer after the other; a list of absent rows is made for a layer, and waves of a ring's half are fetched from it two ahead of the GEMMs."""

    def __init__(self, runtime: "DeviceRuntime") -> None:
        self._runtime = runtime
        self._streams = Streams(runtime.device) if runtime.device.type == "cuda" else OneStream()
        self._lists = torch.zeros(2, ctypes.sizeof(Absent), dtype=torch.uint8, device=runtime.device)
        self._turn = 0
        self._under_way: int | None = None   # the layer whose list is made and whose first waves are fetched, in turn `_turn`
        self._loose = False                  # copies that the main stream does not wait for yet

    def forget(self) -> None:
        """What was fetched ahead is void, because slots change, or because the layers come in another order. Only one block of a process may lead copies, so what runs is waited for."""
        self._under_way = None
        if self._loose:
            self._streams.join()
            self._loose = False

    def forward(self, here: "LayerState", args: MlpArgs) -> None:
        """Queues a layer up to the GEMMs' results."""
        rt, streams = self._runtime, self._streams
        slots, pairs = rt.slots[here.cls], args.layer.tokens * rt.top_k
        ahead = slots.ring > 0 and pairs >= AHEAD * here.experts
        begun = ahead and self._under_way == here.index and not args.layer.begins_step
        self._under_way = None   # also if this layer is not queued to its end: the ring then has waves from its middle
        if not begun:
            self.forget()
            self._turn ^= 1
        size = here.kernels.size_of(args.layer.tokens, here.experts, rt.top_k, scan=True)
        args.layer.plan = rt.tables.plan(1 + self._turn)
        if not slots.ring:   # every row has a slot: nothing can be pushed out
            rt.begin(here, args, size, streams.handle(on_side=False))
            args.fetchers = rt.fetch_blocks
            here.kernels.gemms(args, size, 1, streams.handle(on_side=False))
            return
        waves = -(-min(here.experts, here.experts if ahead else pairs) // slots.ring)
        scan = self._args(args, ahead)
        if ahead and not begun:
            streams.mark("resolved", on_side=False)
            self._begin(here, scan)
        if ahead:
            streams.wait("list", on_side=False)
        else:
            rt.pager.launch("absent_rows", 1, RESOLVE_THREADS, scan, stream=streams.handle(on_side=False))
        rt.pager.launch("resolve_scan", 1, RESOLVE_THREADS, scan, stream=streams.handle(on_side=False))
        streams.mark("resolved", on_side=False)
        here.kernels.quantize(args, size, streams.handle(on_side=False))
        if not ahead:
            streams.wait("resolved", on_side=True)
            for wave in range(min(2, waves)):
                self._fetch(scan, wave)
        for wave in range(waves):
            streams.wait(f"fetched {wave % 2}", on_side=False)
            args.wave = wave
            here.kernels.gemms(args, size, 1, streams.handle(on_side=False))
            streams.mark(f"freed {wave % 2}", on_side=False)
            if wave + 2 < waves:
                self._fetch(scan, wave + 2)
        self._loose = False
        after = rt.next_layer(here)
        if ahead and after is not None and rt.slots[after.cls].ring and pairs >= AHEAD * after.experts:
            self._turn ^= 1
            next_args = MlpArgs()
            next_args.layer = rt.layer_args(after, 0, 0, args.layer.tokens, rt.tables.plan(1 + self._turn))
            self._begin(after, self._args(next_args, True))
            self._under_way = after.index

    def _args(self, args: MlpArgs, ahead: bool) -> ScanArgs:
        return ScanArgs(layer=args.layer, absent=self._lists[self._turn].data_ptr(), ahead=ahead)

    def _begin(self, here: "LayerState", scan: ScanArgs) -> None:
        """Makes the list of a layer's absent rows, and fetches its first two waves."""
        streams = self._streams
        streams.wait("resolved", on_side=True)   # the layer that had this list and this plan before is over when the next one's rows are resolved
        self._runtime.pager.launch("absent_rows", 1, RESOLVE_THREADS, scan, stream=streams.handle(on_side=True))
        streams.mark("list", on_side=True)
        for wave in range(min(2, -(-here.experts // self._runtime.slots[here.cls].ring))):
            self._fetch(scan, wave)

    def _fetch(self, scan: ScanArgs, wave: int) -> None:
        streams = self._streams
        streams.wait(f"freed {wave % 2}", on_side=True)
        scan.wave, self._loose = wave, True
        self._runtime.pager.launch("fetch_ring", self._runtime.fetch_blocks, FETCH_THREADS, scan, stream=streams.handle(on_side=True))
        streams.mark(f"fetched {wave % 2}", on_side=True)

