"""The experts of one worker on a GPU: rows in pinned RAM (HostStore), slots and kernels on the device (DeviceRuntime).

The order of a start: the store is opened and pinned, and the runtime made, while vLLM builds the model (so its profile counts their memory); rows are read in
the background from then on; slots are allocated when the KV cache has its memory; graphs are captured; then, and not before, the device is armed, and the hottest rows
move into the slots. Rows of steps before that are zeros.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from moet.cache.heat import load_heat
from moet.checkpoint import Checkpoint
from moet.engine.vllm import step
from moet.engine.vllm.experts import Experts, bytes_of, info_of, write_info
from moet.engine.vllm.memory import Needs, gib
from moet.engine.vllm.run import Run
from moet.engine.vllm.watch import Watch
from moet.errors import StoreError
from moet.kernels.expert_mlp.cuda import NUMBERS
from moet.moe.encode import check_room, put_all, row_sources
from moet.pack import Pack
from moet.store.budget import Machine, arena_budget

logger = init_logger("vllm.moet")


class DeviceExperts(Experts):
    def open(self, run: Run, opened: Pack | Checkpoint, config: Any) -> None:
        from moet.moe.device import DeviceRuntime
        from moet.store.host import HostStore

        self.began = time.monotonic()
        self.run, settings, scheduler = run, run.settings, config.scheduler_config
        self.limits = (settings.scan_tokens, decode_tokens(config))
        self.slot_layers: frozenset[str] = frozenset()
        self.ready = False  # slots are allocated
        packed = isinstance(opened, Pack)
        sources = {i: f.rows(settings.precision) for i, f in opened.layers.items()} if packed else row_sources(opened, settings.precision)
        self.device, register, modules = self.hardware(sources)
        self.budget = ram_bytes(settings, opened, self.world, memory_of(self.world))
        if not packed:
            check_room(sources, self.budget, self.rank, self.world)
        self.store = HostStore(
            sources, ram_bytes=self.budget, rank=self.rank, world=self.world, io_threads=settings.io_threads, direct_io=settings.direct_io,
            counters_path=run.counters_path(self.rank), failures_path=self.words.device_path, register=register,
        )  # fmt: skip
        if self.store.warning:
            logger.warning("moet: %s", self.store.warning)
        with torch.device("cpu"):  # vLLM builds models under its own default device; what the runtime puts on the GPU says so
            self.runtime = DeviceRuntime(
                self.store, activation=opened.activation if packed else opened.spec.activation, top_k=self.spec.top_k, device=self.device,
                max_tokens=scheduler.max_num_batched_tokens, decode_tokens=self.limits[1], ring_rows=settings.ring_rows, fetch_blocks=settings.fetch_blocks,
                limit_s=settings.wait_limit_s, prefill_activations=settings.prefill_activations, drafters=[index for index in self.layers if index >= self.spec.num_layers], modules=modules,
            )  # fmt: skip
        self.known_heat = None
        if self.heat and settings.preheat:
            self.known_heat = load_heat(self.heat, self.fingerprint, self.precision, {index: source.experts for index, source in sources.items()})
        activations = ", ".join(sorted({("int15", "fp16", "bf16")[NUMBERS[source.geometry.format]] for source in sources.values()}))   # of decoding
        self.info = info_of(opened, settings.precision) | {"budget_bytes": self.budget, "activations": activations, "prefill_activations": settings.prefill_activations}
        write_info(run, self.rank, self.info)
        if not packed:
            put_all(opened, sources, self.store, torch.get_num_threads())
        wanted = packed and (settings.preheat or any(c.resident for c in self.store.classes))
        # A native call without a CUDA call in it, so graphs can be captured meanwhile.
        self.filling = Filling(self.store, self.known_heat) if wanted else None
        heat = (self.heat, self.fingerprint, self.precision) if self.heat else None
        self.watch = Watch(self.runtime, self.store, self.words, self.rank, run.device_counters_path(self.rank), heat)
        self.close_with(close, self.watch, self.filling, self.runtime, self.store)

    def hardware(self, sources: Any) -> tuple[torch.device, Any, Any]:
        """Device, what pins memory for it, and kernels (None: compiled now)."""
        from moet.store.pinned import cuda_register

        return torch.device("cuda", torch.cuda.current_device()), cuda_register, None

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def needs(self, kv_all: int, kv_one: int) -> Needs:
        return Needs(self.rows_bytes, self.runtime.gpu_bytes_minimum(), kv_all, kv_one)

    @property
    def rows_bytes(self) -> int:
        return sum(c.slot_bytes * c.rows for c in self.store.classes)

    def allocate(self, slots: int, kv: int, slot_layers: frozenset[str]) -> None:
        """slots: bytes of slots; kv: of the KV cache, for the log."""
        self.slot_layers = slot_layers
        self.runtime.allocate(slots if slots < self.rows_bytes else 0)
        self.ready = True
        coverage = self.runtime.coverage()
        self.info |= {"gpu_slot_bytes": slots, "gpu_coverage": coverage}
        write_info(self.run, self.rank, self.info)
        logger.info(
            "moet: GPU memory: %s GiB of slots hold %.1f %% of the experts' %s GiB, %s GiB are the KV cache's; arena in RAM: %s",
            gib(slots), 100 * coverage, gib(self.rows_bytes), gib(kv), f"{gib(self.budget)} GiB" if self.budget else "all rows",
        )  # fmt: skip

    def start(self) -> None:
        """After capture: fills the slots and lets the device page. Raises what reading the rows raised.

        Without heat of an earlier run, slots are filled only from RAM: which rows are worth a read is not known.
        """
        read = self.filling.result() if self.filling else 0
        self.runtime.arm(True)
        loaded = 0
        if self.run.settings.preheat and (self.known_heat is not None or not self.store.mailbox):
            loaded = self.runtime.preload(self.known_heat)  # through the pager's own path, so armed
            self.words.forgive(self.rank)
        self.watch.start()
        logger.info("moet: %d rows read into RAM, %d moved into slots, %.1f s after the store was opened", read, loaded, time.monotonic() - self.began)

    def forward(self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not self.ready:  # profiling: graphs are captured once before slots exist, to see how much memory they take
            return torch.zeros_like(x)
        now = step.current_on_device(*self.limits, self.slot_layers, x.shape[0], self.capturing())
        if now.kv_slots is None:
            return torch.zeros_like(x)
        return self.runtime.forward(layer, x.contiguous(), weights.float().contiguous(), ids.int().contiguous(), now.kv_slots, now.scan)


class Filling:
    """Rows on their way into RAM, in the background; `stop` ends it after the batch that is being read, so that a server which is stopped early does not read on for minutes.
    The thread is a daemon: others are waited for before an exit function could stop them."""

    def __init__(self, store: Any, heat: Mapping[int, Any] | None) -> None:
        self.stopping, self.done = threading.Event(), Future[int]()
        threading.Thread(target=self._run, args=(store, heat), name="moet-fill", daemon=True).start()

    def _run(self, store: Any, heat: Mapping[int, Any] | None) -> None:
        try:
            self.done.set_result(store.fill(heat, self._go_on))
        except Exception as e:  # noqa: BLE001  whoever asks for the result gets it
            self.done.set_exception(e)

    def _go_on(self, done: int, total: int) -> None:
        if self.stopping.is_set():
            raise StoreError(f"reading rows ahead: stopped after {done} of {total}")

    def result(self) -> int:
        """How many came. Raises what reading them raised."""
        return self.done.result()

    def stop(self) -> None:
        self.stopping.set()
        wait([self.done])


def close(watch: Watch, filling: Filling | None, runtime: Any, store: Any) -> None:
    watch.stop()
    if filling:
        filling.stop()
    runtime.close()
    store.close()


def decode_tokens(config: Any) -> int:
    """Rows of the largest step without a prefill: each request's token and its drafts (runner V2: decode_query_len)."""
    spec = config.speculative_config
    per_request = 1 + (spec.num_speculative_tokens or 0 if spec is not None else 0)
    return min(config.scheduler_config.max_num_seqs * per_request, config.scheduler_config.max_num_batched_tokens)


def memory_of(world: int) -> Machine:
    """What the machine has before any of its ranks pins a part."""
    machine = Machine.read()
    if world > 1:
        get_tp_group().barrier()
    return machine


def ram_bytes(settings: Any, opened: Pack | Checkpoint, world: int, machine: Machine) -> int:
    """Of this rank's arena, 0 for all rows: as set, else all rows or what the machine has left. Raises StoreError if that is too little."""
    rows = bytes_of(opened, settings.precision)
    wanted = (settings.budget_bytes(rows) or rows) // world if settings.ram_gib or settings.ram_percent else None
    found = arena_budget(machine, rows // world, wanted, world)
    logger.info("moet: arena: %s", found.why)
    return found.ram_bytes if found.ram_bytes < rows // world else 0
