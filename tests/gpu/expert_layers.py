"""Small layers of random experts for the GPU tests: their rows, a store and a runtime over them, and what the float64 reference makes of a batch."""

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from dequantized import Expected, decode
from dequantized import layer as expected
from layout_cases import random_expert

from moet.kernels.expert_mlp.cuda import SOURCES
from moet.kernels.expert_mlp.scaled import sources
from moet.kernels.paging.state import WORKING, SlotClass
from moet.layout import RowGeometry, pack_row
from moet.models import Activation
from moet.moe.device import PAGER_SOURCES, DeviceCounters, DeviceRuntime
from moet.store import HostStore, RowSource
from moet.store.pinned import cuda_register

ALIGNED = 4096


def expert_row(geometry: RowGeometry, seed: int) -> np.ndarray:
    row, expert = np.empty(geometry.row_bytes, np.uint8), random_expert(geometry, seed)
    pack_row(geometry, expert.gate, expert.up, expert.down, row)
    return row


@dataclass
class Layers:
    """`rows[layer]` is uint8 [experts, row_bytes], random unless given; all layers have as many experts."""

    geometries: Mapping[int, RowGeometry]
    experts: int
    activation: Activation = field(default_factory=Activation)
    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = self.rows or {
            layer: np.stack([expert_row(geometry, 1000 * layer + e) for e in range(self.experts)]) for layer, geometry in self.geometries.items()
        }

    def write(self, folder: Path) -> dict[int, RowSource]:
        """Row files as a pack has them."""
        sources = {}
        for layer, geometry in self.geometries.items():
            path = folder / f"rows-{layer:03d}"
            with path.open("wb") as file:
                file.write(bytes(ALIGNED) + self.rows[layer].tobytes())
                file.flush()
                os.fsync(file.fileno())
            sources[layer] = RowSource(geometry, self.experts, path, ALIGNED)
        return sources

    def store(self, folder: Path | None = None, **options) -> HostStore:
        """Over row files in `folder`; without one, rows that are put and stay."""
        if folder is None:
            store = HostStore({layer: RowSource(g, self.experts) for layer, g in self.geometries.items()}, **options)
            for layer, rows in self.rows.items():
                for expert, row in enumerate(rows):
                    store.put(layer, expert, row)
        else:
            store = HostStore(self.write(folder), **options)
        return store

    def reference(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, masked: Sequence[int] = (), without: Sequence[int] = ()
    ) -> Expected:
        """`without`: experts that contribute zeros, `masked`: tokens that are none."""
        chosen = ids.clone()
        chosen[list(masked)] = -1
        geometry, wanted = self.geometries[layer], set(chosen.unique().tolist()) & set(range(self.experts))
        experts = {e: decode(geometry, torch.from_numpy(self.rows[layer][e]).to(x.device)) for e in wanted - set(without)}
        return expected(experts, x.masked_fill((chosen < 0).all(-1, keepdim=True), 0), weights, chosen, self.activation, None)


def batch(
    tokens: int, hidden: int, experts: int, top_k: int, seed: int = 0, device: torch.device | str = "cpu", popularity: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_weights, topk_ids: random, with outlier channels as hidden states have them. popularity: [experts], of a draw without replacement."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    x[:, rng.integers(0, hidden, max(1, hidden // 50))] *= 20
    noise = rng.gumbel(size=(tokens, experts)) + (0 if popularity is None else np.log(popularity))
    ids = np.argsort(-noise, axis=1)[:, :top_k].astype(np.int32)
    weights = rng.uniform(0.05, 1, (tokens, top_k)).astype(np.float32)
    return torch.from_numpy(x).bfloat16().to(device), torch.from_numpy(weights).to(device), torch.from_numpy(ids).to(device)


def open_runtime(store: HostStore, layers: Layers, top_k: int, emulated: bool, **options) -> DeviceRuntime:
    settings = {"max_tokens": 320, "decode_tokens": 320, "ring_rows": 4, "fetch_blocks": 4, "limit_s": 5.0} | options
    if emulated:
        settings["modules"] = {-1: emulated_module(-1), **{g.format_index: emulated_module(g.format_index, sources(g.format, settings.get("prefill_activations", "bf16"))) for g in layers.geometries.values()}}
    return DeviceRuntime(store, activation=layers.activation, top_k=top_k, device=torch.device("cpu" if emulated else "cuda"), **settings)


@functools.cache
def emulated_module(format: int, of_format: tuple[str, ...] = SOURCES):
    """The pager's kernels (-1) or a row format's, for the CPU."""
    from tests.cpu.emulator.build import EmulatedModule

    return EmulatedModule(PAGER_SOURCES, {}) if format < 0 else EmulatedModule(of_format, {"FORMAT": format})


def registration(emulated: bool):
    """What a store needs to pin its memory; None where the device is the CPU."""
    return None if emulated else cuda_register


def counters(runtime: DeviceRuntime) -> DeviceCounters:
    """Once the device is done: by itself `DeviceRuntime.counters` waits for nothing."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    return runtime.counters()


def table(runtime: DeviceRuntime, cls: int, pool: bool = False) -> dict[str, object]:
    """The bookkeeping of a class as it is in device memory: numpy arrays, `staged` a mask over the slots; with `pool`, the slots' bytes too."""
    tables = runtime.tables
    if tables.device.type == "cuda":
        torch.cuda.synchronize()
    arrays, size = tables._arrays[cls], ctypes.sizeof(SlotClass)
    c = SlotClass.from_buffer_copy(tables._classes[cls * size : (cls + 1) * size].cpu().numpy().tobytes())
    found: dict[str, object] = {name: getattr(c, name) for name in ("rows", "slots", "staging", "ring", "evictions", "admitted", "touches")}
    for name in ("slot_of", "row_of", "heat", "valid", "stamp"):
        values = getattr(arrays, name).cpu().numpy().copy()
        found[name] = values if name in ("slot_of", "heat") else values[: c.slots]
    found["staged"] = found["stamp"] != WORKING
    if pool:
        found["pool"] = arrays.pool.cpu().numpy().copy().reshape(-1, c.slot_bytes)[: c.slots]
    return found


def poison_memory(emulated: bool, megabytes: int = 256) -> None:
    """Leaves NaNs in the memory that a runtime will get: it must not read what it did not write."""
    if not emulated:
        blocks = [torch.full((megabytes << 17,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        blocks += [torch.full((n,), torch.nan, dtype=torch.bfloat16, device="cuda") for n in (256, 4096, 1 << 18) for _ in range(16)]
        torch.cuda.synchronize()
        del blocks


def poison_scratch(runtime: DeviceRuntime) -> None:
    """NaN in all scratch that holds nothing between calls."""
    for tensor in runtime._scratch.tensors:
        tensor.view(torch.uint8).fill_(0xFF)


def device_of(emulated: bool) -> str:
    return "cpu" if emulated else "cuda"


def bits(out: torch.Tensor) -> bytes:
    return out.view(torch.int16).cpu().numpy().tobytes()
