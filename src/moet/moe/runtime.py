"""ExpertRuntime: what an engine holds. Torch tensors in and out; rows, threads and scratch are native."""

import ctypes
import threading
from pathlib import Path
from typing import Self

import torch

from moet import native
from moet.cache.heat import load_heat, save_heat
from moet.checkpoint import Checkpoint
from moet.errors import ConfigError, StoreError
from moet.kernels.expert_mlp.native import ACTIVATIONS, CActivation, Threads, c_activation, lib
from moet.models import Activation
from moet.moe.encode import check_room, put_all, row_sources
from moet.pack import Pack
from moet.quantize import RowReport
from moet.store import Counters, Pager

SCRATCH_BYTES = 64 << 20

_i32, _i64 = ctypes.c_int32, ctypes.c_int64


class _CLayer(ctypes.Structure):
    """CLayer of native/moe/forward.cpp."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "weights", "ids", "out")]
        + [("scratch_bytes", _i64)]
        + [(name, _i32) for name in ("index", "tokens", "top_k", "experts", "bf16", "scan", "acts", "reserved")]
        + [("activation", CActivation)]
    )


class ExpertRuntime:
    """The routed experts of one rank: `forward` gives a layer's result whatever the arena held, with the same bits for any budget, batch and threads.

    precision: `base` or `native` rows. budget_bytes: of the arena, 0 for all rows. threads: of the kernels; io_threads read rows.
    heat_file: where the routing counts are kept from run to run (None: nowhere); preheat reads the hottest rows at start, in the background.
    activations: number format of the activations, one of moet.kernels.ACTIVATIONS. scratch_bytes: bound of the buffers per (token, expert) pair;
    a larger batch is cut into equal chunks, each of which pages its experts by itself.
    Raises PackError, StoreError, ConfigError.
    """

    def __init__(
        self, pack: Pack, *, precision: str, budget_bytes: int, threads: int, rank: int = 0, world: int = 1, io_threads: int = 8,
        direct_io: bool = True, heat_file: Path | None = None, preheat: bool = False, activations: str = "int24",
        counters_path: Path | None = None, scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:  # fmt: skip
        self._configure(pack.activation, threads, activations, scratch_bytes)
        self.pager = Pager.from_pack(
            pack, precision, budget_bytes=budget_bytes, rank=rank, world=world, io_threads=io_threads, direct_io=direct_io, counters_path=counters_path
        )
        self.report: RowReport | None = None
        self._heat = (Path(heat_file), pack.fingerprint, precision) if heat_file else None
        if self._heat:
            heat = load_heat(*self._heat, {index: source.experts for index, source in self.pager.layers.items()})
            if heat is not None:
                self.pager.set_heat(heat)
        if preheat:
            self.pager.preheat()

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, precision: str, budget_bytes: int = 0, threads: int, rank: int = 0, world: int = 1,
        activations: str = "int24", counters_path: Path | None = None, scratch_bytes: int = SCRATCH_BYTES,
    ) -> Self:  # fmt: skip
        """Encodes all experts now, into an arena that holds all rows (budget_bytes 0: as many bytes as they take). `report` is the encoding's.

        Raises StoreError with the bytes needed if the budget is below them, CheckpointError, QuantizeError.
        """
        sources = row_sources(checkpoint, precision)
        check_room(sources, budget_bytes, rank, world)
        self = cls.__new__(cls)
        self._configure(checkpoint.spec.activation, threads, activations, scratch_bytes)
        self.pager = Pager(sources, budget_bytes=0, rank=rank, world=world, io_threads=1, counters_path=counters_path)
        self._heat = None
        try:
            self.report = put_all(checkpoint, sources, self.pager, threads)
        except BaseException:
            self.close()
            raise
        return self

    def _configure(self, activation: Activation, threads: int, activations: str, scratch_bytes: int) -> None:
        if activations not in ACTIVATIONS:
            raise ConfigError(f"activations: expected one of {', '.join(ACTIVATIONS)}, found {activations!r}")
        self.activations = activations
        self._activation = c_activation(activation)
        self._scratch_bytes = scratch_bytes
        self._threads = Threads(threads)
        self._lock = threading.Lock()
        lib().moet_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_CLayer), ctypes.c_char_p, ctypes.c_size_t]

    def forward(self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, scan: bool = False) -> torch.Tensor:
        """[tokens, hidden], dtype of x: for each token the sum over its k places, in order, of weight * expert(x), in float32.

        x: float32 or bfloat16 [tokens, hidden]; topk_weights: float32 [tokens, k]; topk_ids: int32 [tokens, k], negative for a place that routes
        nowhere. scan: rows of a prefill, which never evict those that decoding uses. All contiguous, on the CPU.
        Raises StoreError that names file, layer and expert if a row cannot be read, ConfigError for a wrong shape or dtype.
        """
        position, source = self.pager.position(layer), self.pager.layers[layer]
        hidden, k = source.geometry.hidden, topk_ids.shape[-1]
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"layer {layer}, x: expected float32 or bfloat16, found {x.dtype}")
        for name, tensor, dtype, shape in (
            ("x", x, x.dtype, (len(x), hidden)),
            ("topk_weights", topk_weights, torch.float32, (len(x), k)),
            ("topk_ids", topk_ids, torch.int32, (len(x), k)),
        ):
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ConfigError(
                    f"layer {layer}, {name}: expected contiguous {dtype} {list(shape)} on the CPU, "
                    f"found {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )
        out = torch.empty_like(x)
        arguments = _CLayer(
            x.data_ptr(), topk_weights.data_ptr(), topk_ids.data_ptr(), out.data_ptr(), self._scratch_bytes, position, len(x), k, source.experts,
            x.dtype == torch.bfloat16, scan, ACTIVATIONS.index(self.activations), 0, self._activation,
        )  # fmt: skip
        with self._lock:
            native.call(lib().moet_forward, self._threads.handle, self.pager.handle, ctypes.byref(arguments), error=StoreError)
        return out

    def counters(self) -> Counters:
        return self.pager.counters()

    def close(self) -> None:
        """Saves the heat, ends the threads and unmaps the arena. Twice is fine."""
        with self._lock:
            if self._heat and self.pager._handle:
                path, fingerprint, precision = self._heat
                save_heat(path, fingerprint, precision, self.pager.heat())
            self.pager.close()
            self._threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
