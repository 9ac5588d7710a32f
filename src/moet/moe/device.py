"""DeviceRuntime: the routed experts of one rank on a GPU. Slots, kernels and scratch; docs/pager.md explains the paging."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from moet.config import PrefillActivations
from moet.errors import ConfigError
from moet.kernels.expert_mlp.cuda import MlpArgs, mlp_args
from moet.kernels.expert_mlp.launches import COMBINED_TOKENS, ExpertKernels, Size
from moet.kernels.expert_mlp.scaled import SCALED_CAPABILITY, sources
from moet.kernels.gpu.module import CudaModule, Module, capability, has_watchdog
from moet.kernels.paging.state import COUNTERS, MAX_EXPERTS, MAX_PAIRS, LayerArgs
from moet.models import Activation
from moet.moe.scan import Scan
from moet.moe.scratch import Scratch
from moet.moe.slots import ClassNeeds, ClassSlots, minimum_bytes, split
from moet.moe.tables import Tables
from moet.store import HostStore

PAGER_SOURCES = ("paging/resolve.cuh", "paging/scan.cuh", "expert_mlp/begin.cuh")
WATCHED_LIMIT_S = 1.0
"""Displays' watchdogs end a kernel after 2 s (Windows) or 5 s; a row that takes longer than this from disk is lost there, and not the process."""


def allowed_wait(limit_s: float, watchdog: bool) -> float:
    """Seconds that a kernel may wait for a row."""
    return min(limit_s, WATCHED_LIMIT_S) if watchdog else limit_s


EMULATED_CAPABILITY = 9, 0
"""Whose paths kernels take where the device is a CPU."""


@dataclass(frozen=True)
class DeviceCounters:
    """Since the runtime was armed; as kernels/paging/state.cuh names them. Rows are distinct experts of a layer; times are nanoseconds."""

    hits: int
    misses: int
    scan_hits: int
    scan_misses: int
    waves: int
    layers: int
    fetched_rows: int
    fetched_bytes: int
    arena_misses: int
    torn_copies: int
    failed_rows: int
    timeouts: int
    fetch_nanoseconds: int
    stall_nanoseconds: int
    steps: int

    @classmethod
    def of(cls, words: Sequence[int]) -> Self:
        return cls(*(int(w) for w in words[: len(COUNTERS)]))


@dataclass
class LayerState:
    """What every launch of a layer starts from."""

    index: int
    begins_step: bool
    experts: int
    cls: int
    first_row: int
    mlp: MlpArgs
    kernels: ExpertKernels


class DeviceRuntime:
    """The experts of one rank: `forward` gives a layer's result with the same bits whatever the slots held.

    store: the host's tiers. max_tokens: rows of the largest batch; decode_tokens: of the largest one with scan=False. ring_rows: rows of one half of the ring that scans
    stream through, at most. fetch_blocks: thread blocks that fetch. limit_s: seconds without progress after which a row counts as lost; at most 1 where the
    GPU has a watchdog (`limit_s` is then what holds).
    drafters: layers that begin a forward of their own.
    prefill_activations: of batches with many tokens an expert. "mxfp8": E4M3 with a power of two for 32 values (kernels/expert_mlp/README.md), from compute capability
    8.9 on; rows in nvfp4 and bf16 keep bf16.
    modules: row format's number (-1: the pager) -> compiled kernels, for tests; device "cpu" goes with an emulator's.
    Everything but the slots is allocated here; no kernel runs before `allocate`. Requests to a store's mailbox have one row of numbers: a second runtime over it is
    refused until the first one is closed. Raises MoetError, ConfigError.
    """

    def __init__(
        self, store: HostStore, *, activation: Activation, top_k: int, device: torch.device, max_tokens: int, decode_tokens: int,
        ring_rows: int = 32, fetch_blocks: int = 8, limit_s: float = 30.0, drafters: Collection[int] = (),
        prefill_activations: PrefillActivations = "bf16", modules: Mapping[int, Module] | None = None,
    ) -> None:  # fmt: skip
        if decode_tokens > max_tokens or min(decode_tokens, top_k, ring_rows, fetch_blocks) < 1:
            raise ConfigError(
                f"device runtime: expected 1 <= decode_tokens <= max_tokens, and top_k, ring_rows, fetch_blocks of at least 1, found {decode_tokens}, "
                f"{max_tokens}, {top_k}, {ring_rows}, {fetch_blocks}"
            )
        if max_tokens * top_k > MAX_PAIRS:
            raise ConfigError(f"device runtime: expected max_tokens * top_k of at most {MAX_PAIRS}, to which the kernels count, found {max_tokens * top_k}. Lower max_num_batched_tokens")
        for index, source in store.layers.items():
            if source.experts > MAX_EXPERTS:
                raise ConfigError(f"layer {index}: expected at most {MAX_EXPERTS} experts, one for each thread of the kernel that plans a layer, found {source.experts}")
        if store.mailbox and store.served is not None and store.served() is not None:
            raise ConfigError("device runtime: expected a store whose mailbox no other runtime uses, found one that is not closed; close() it first")
        self.store, self.device, self.top_k = store, torch.device(device), top_k
        self.max_tokens, self.decode_tokens, self.ring_rows, self.fetch_blocks = max_tokens, decode_tokens, ring_rows, fetch_blocks
        self._multiprocessors = 4 if self.device.type == "cpu" else torch.cuda.get_device_properties(self.device).multi_processor_count
        number = self.device.index or 0
        self._modules = modules = dict(modules or {})
        formats = {source.geometry.format: source.geometry.format_index for source in store.layers.values()}
        major, minor = capability(number) if self.device.type == "cuda" else EMULATED_CAPABILITY
        if prefill_activations == "mxfp8" and (major, minor) < SCALED_CAPABILITY:
            raise ConfigError(f"GPU {number}: expected compute capability 8.9 or newer for prefill_activations mxfp8, found {major}.{minor}; use bf16")
        for name, f in formats.items():
            if f not in modules:
                modules[f] = CudaModule(sources(name, prefill_activations), {"FORMAT": f}, number)
        if -1 not in modules:
            modules[-1] = CudaModule(PAGER_SOURCES, {}, number)
        self.pager = modules[-1]
        self._kernels = {name: ExpertKernels(name, modules[f], self.pager, 10 * major + minor, self._multiprocessors, prefill_activations) for name, f in formats.items()}
        self._layers = self._describe(activation, drafters)
        self.needs = [
            ClassNeeds(c.slot_bytes, c.rows, most, min(decode_tokens * top_k, most), len(c.layers) * top_k)
            for c in store.classes
            for most in [max(store.layers[layer].experts for layer in c.layers)]
        ]
        pairs = max_tokens * top_k
        few = max(layer.kernels.most_small(max_tokens, decode_tokens, layer.experts, top_k) for layer in self._layers.values())
        self._scratch = Scratch(
            max_tokens, few, top_k, max(layer.mlp.hidden for layer in self._layers.values()), max(layer.mlp.act_stride for layer in self._layers.values()), self.device
        )
        self.limit_s = allowed_wait(limit_s, self.device.type == "cuda" and has_watchdog(number))
        self.tables = Tables(store, self.device, pairs, self.limit_s)
        self._scan = Scan(self)
        self.slots: list[ClassSlots] = []
        self._smallest: list[ClassSlots] = []
        self._closed = False
        store.served = weakref.ref(self)

    def _describe(self, activation: Activation, drafters: Collection[int]) -> dict[int, LayerState]:
        out = {}
        for number, cls in enumerate(self.store.classes):
            for index, row in cls.layers.items():
                source, layout = self.store.layers[index], self.store.layout(index)
                part = source.geometry.slice(self.store.rank, self.store.world)
                mlp = mlp_args(source.geometry, part, layout.segments, activation, self.store.rank)
                out[index] = LayerState(
                    index, index in drafters or index == min(self.store.layers), source.experts, number, row, mlp, self._kernels[source.geometry.format]
                )
        return dict(sorted(out.items()))

    # --- memory

    def gpu_bytes_minimum(self) -> int:
        """Bytes of the smallest slots that work."""
        return minimum_bytes(self.needs)

    def allocate(self, gpu_bytes: int = 0, smallest_bytes: int | None = None) -> None:
        """Slots within gpu_bytes (0: all rows), once, before a graph is captured. smallest_bytes: what `resize` may go down to afterwards (captured waves suffice).

        Raises ConfigError if they are too few, torch.OutOfMemoryError; then it may be called again.
        """
        if self.slots:
            raise ConfigError("slots: expected allocate() once, found that they are there; resize() changes their number")
        slots = split(self.needs, gpu_bytes, self.ring_rows)
        smallest = slots if smallest_bytes is None else split(self.needs, smallest_bytes, self.ring_rows)
        self.tables.allocate(slots)
        self.slots, self._smallest = slots, smallest

    def resize(self, gpu_bytes: int) -> None:
        """Other numbers of slots in the memory that `allocate` took; all of them empty. Raises ConfigError, and changes nothing, for more, or for fewer than
        `smallest_bytes` allowed."""
        slots = split(self.needs, gpu_bytes, self.ring_rows)
        for needs, new, least, capacity in zip(self.needs, slots, self._smallest, self.tables.capacities, strict=True):
            enough = min(least.staging or needs.decode_rows, needs.decode_rows)   # with every row in a slot, one wave was captured
            if new.staging and new.staging < enough:
                raise ConfigError(f"slots: expected at least {enough} in staging, which captured graphs count on, found {new.staging}; allocate() with smallest_bytes")
            if new.total > capacity:
                raise ConfigError(f"slots: expected at most {capacity} of {needs.slot_bytes} bytes, for which memory was allocated, found {new.total}")
        self._scan.forget()
        self.tables.reset(slots)
        self.slots = slots

    def coverage(self) -> float:
        """Share of all rows' bytes that slots hold, ring apart."""
        return sum(n.slot_bytes * s.slots for n, s in zip(self.needs, self.slots, strict=True)) / sum(n.slot_bytes * n.rows for n in self.needs)

    def preload(self, heat: Mapping[int, np.ndarray] | None = None) -> int:
        """Fills the working set through the pager's own path, hottest rows first (no heat: in the order of layers); returns how many. Heat is `heat`'s afterwards.

        Raises ConfigError unless heat has one value for each expert of each layer.
        """
        for index, layer in self._layers.items() if heat is not None else ():
            shape = np.shape(heat[index]) if index in heat else "none"
            if shape != (layer.experts,):
                raise ConfigError(f"heat of layer {index}: expected {layer.experts} values, found {shape}")
        wanted: dict[int, list[int]] = {}
        for number, (needs, slots) in enumerate(zip(self.needs, self.slots, strict=True)):
            rows = [(layer.index, e) for layer in self._layers.values() if layer.cls == number for e in range(layer.experts)]
            if heat is not None:
                rows.sort(key=lambda row: -int(heat[row[0]][row[1]]))
            elif slots.slots < needs.rows:
                rows.sort(key=lambda row: row[1])   # the same share of every layer
            for index, e in rows[: slots.slots - slots.staging]:
                wanted.setdefault(index, []).append(e)
        armed = self.tables.armed
        self.arm()   # rows move through the kernels of a layer
        for index, experts in wanted.items():
            self._touch(index, sorted(experts))
        self.arm(armed)
        self.tables.set_heat({index: (layer.cls, layer.first_row, layer.experts) for index, layer in self._layers.items()}, heat)
        self.tables.clear_counters()
        return sum(map(len, wanted.values()))

    def _touch(self, index: int, experts: list[int]) -> None:
        """One forward of zeros that routes to these experts; rows that find a free slot of the working set stay there."""
        layer = self._layers[index]
        tokens = -(-len(experts) // self.top_k)
        ids = torch.full((tokens * self.top_k,), -1, dtype=torch.int32)
        ids[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
        per = self.decode_tokens
        ids = ids.view(tokens, self.top_k).to(self.device)
        for start in range(0, tokens, per):
            part = ids[start : start + per].contiguous()
            x = torch.zeros(len(part), layer.mlp.hidden, dtype=torch.bfloat16, device=self.device)
            self.forward(index, x, torch.zeros(part.shape, device=self.device), part)

    def arm(self, on: bool = True) -> None:
        """Until armed, no row routes, fetches or heats, and outputs are zeros: warm-up, profiling, capture."""
        self._scan.forget()
        self.tables.arm(on)

    def counters(self) -> DeviceCounters:
        """Read beside the running stream; safe from another thread unless a graph is being captured."""
        return DeviceCounters.of(self.tables.read_counters())

    def heat(self) -> dict[int, np.ndarray]:
        """uint32 [experts] of each layer."""
        flat = self.tables.heat()
        return {index: flat[layer.cls][layer.first_row : layer.first_row + layer.experts] for index, layer in self._layers.items()}

    def close(self) -> None:
        """Waits for the device; no layer runs afterwards. Twice is fine; the store stays open, and another runtime may be made over it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._closed = True
        if self.store.served is not None and self.store.served() is self:
            self.store.served = None

    # --- the layer

    def forward(
        self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, kv_slots: torch.Tensor | None = None, scan: bool = False
    ) -> torch.Tensor:
        """bf16 [tokens, hidden]: for each token the sum over its places, in order, of weight * expert(x).

        x bf16 [tokens, hidden]; topk_weights float32, topk_ids int32 [tokens, k], no expert's number for a place that routes nowhere; kv_slots int64 [tokens], negative for a row that is
        no token (it gives zeros), or None. An expert may stand twice in a token's ids and counts twice. A token with a value that is not finite gives one that is not finite, and changes no
        other. scan: rows of a prefill, which leave the decode working set as it is; not capturable. All contiguous, on the device.
        Raises ConfigError for a wrong shape or dtype, StoreError if the store is closed.
        """
        here, tokens = self._layers[layer], len(x)
        self._check(here, x, topk_weights, topk_ids, kv_slots, scan)
        out = torch.empty_like(x)
        if tokens == 0:
            return out
        args = MlpArgs.from_buffer_copy(here.mlp)
        kv = kv_slots.data_ptr() if kv_slots is not None else 0
        args.layer = self.layer_args(here, topk_ids.data_ptr(), kv, tokens, self.tables.plan(0))
        args.x, args.weights, args.out = x.data_ptr(), topk_weights.data_ptr(), out.data_ptr()
        self._scratch.give(args)
        if scan:
            self._scan.forward(here, args)
        else:
            self._decode(here, args)
        if not args.combines:
            here.kernels.combine(args, self._stream())
        return out

    def _check(self, here: LayerState, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kv_slots: torch.Tensor | None, scan: bool) -> None:
        shapes = [("x", x, torch.bfloat16, (len(x), here.mlp.hidden))]
        shapes += [("topk_weights", weights, torch.float32, (len(x), self.top_k)), ("topk_ids", ids, torch.int32, (len(x), self.top_k))]
        if kv_slots is not None:
            shapes.append(("kv_slots", kv_slots, torch.int64, (len(x),)))
        for name, tensor, dtype, shape in shapes:
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != self.device.type:
                raise ConfigError(
                    f"layer {here.index}, {name}: expected contiguous {dtype} {list(shape)} on {self.device}, found {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )
        if len(x) > (self.max_tokens if scan else self.decode_tokens):
            raise ConfigError(
                f"layer {here.index}: expected at most {self.max_tokens} tokens, {self.decode_tokens} where it is no scan, found {len(x)}"
            )
        if not self.slots:
            raise ConfigError("device runtime: expected allocate() before forward()")
        if self._closed:
            raise ConfigError("device runtime: expected an open one, found it closed")
        _ = self.store.handle   # whose memory the kernels read: says so if it is closed

    def layer_args(self, here: LayerState, ids: int, kv_slots: int, tokens: int, plan: int) -> LayerArgs:
        """ids, kv_slots, plan: device addresses."""
        return LayerArgs(
            slots=self.tables.slots_address(here.cls), control=self.tables.control_address, plan=plan, topk_ids=ids, kv_slots=kv_slots, tokens=tokens,
            top_k=self.top_k, experts=here.experts, cls=here.cls, first_row=here.first_row, begins_step=here.begins_step,
        )  # fmt: skip

    def next_layer(self, here: LayerState) -> LayerState | None:
        """The layer that the same forward comes to next."""
        following = [layer for layer in self._layers.values() if layer.index > here.index]
        return following[0] if following and not following[0].begins_step else None

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def begin(self, here: LayerState, args: MlpArgs, size: Size, stream: int) -> None:
        """Queues the launch that decides which slot each row has; a baseline may decide otherwise."""
        here.kernels.begin(args, size, stream)

    def _decode(self, here: LayerState, args: MlpArgs) -> None:
        self._scan.forget()
        pairs, stream = args.layer.tokens * self.top_k, self._stream()
        size = here.kernels.size_of(args.layer.tokens, here.experts, self.top_k, scan=False)
        self.begin(here, args, size, stream)
        args.fetchers, args.combines = self.fetch_blocks, args.layer.tokens <= COMBINED_TOKENS
        here.kernels.gemms(args, size, self._smallest[here.cls].waves(min(pairs, here.experts)), stream, early=True)
