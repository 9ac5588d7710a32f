"""A GPU's memory with an arena and a mailbox server beside it, for tests of fetch and of scans."""

import ctypes
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np
from paging_memory import Memory

from moet.kernels.paging.state import FAILED_ROW, LayerArgs, Mailbox

HOST = str(Path(__file__).with_name("paging_host.cuh"))
SOURCES = ["paging/resolve.cuh", "paging/scan.cuh", HOST]


class ReadArgs(ctypes.Structure):
    _fields_ = [
        ("layer", LayerArgs),
        ("disk", c_void_p),
        ("found", c_void_p),
        ("wave", c_int32),
        ("parts", c_int32),
    ]


class HostArgs(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("mailbox", "location", "arena", "disk", "fails")],
        *[(name, c_int32) for name in ("rows", "arena_slots")],
        ("slot_bytes", c_int64),
        *[(name, c_uint32) for name in ("seed", "evicts", "dead", "seen")],
        *[(name, c_uint64) for name in ("served", "evicted", "most_pinned")],
    ]


class Rig:
    """A GPU's memory, and an arena with `arena_slots` of the rows (0: all, and no mailbox)."""

    def __init__(self, module, experts=12, layers=2, slots=8, arena_slots=0, seed=1, evicts=0, slot_bytes=1040, **policy):
        self.module, self.seed = module, seed
        self.rng = np.random.default_rng(seed)
        self.memory = memory = Memory(experts, layers, slots, slot_bytes=slot_bytes, **policy)
        rows = experts * layers
        self.disk = self.rng.integers(0, 256, (rows, slot_bytes), np.uint8)
        self.fails = np.zeros(rows, np.uint8)
        self.location = np.zeros(rows, np.uint64)
        held = arena_slots or rows
        raw = np.zeros(held * slot_bytes + 16, np.uint8)
        self.arena = raw[-raw.ctypes.data % 16 :][: held * slot_bytes].reshape(held, slot_bytes)
        self.arena[:] = self.disk[:held]
        self.location[:held] = (1 << 32) + np.arange(held) + 1
        memory.cls.arena, memory.cls.location = self.arena.ctypes.data, self.location.ctypes.data
        self.mailbox = Mailbox()
        if arena_slots:
            memory.control.mailbox = ctypes.addressof(self.mailbox)
        self.host = HostArgs(
            mailbox=ctypes.addressof(self.mailbox), location=self.location.ctypes.data, arena=self.arena.ctypes.data, disk=self.disk.ctypes.data,
            fails=self.fails.ctypes.data, rows=rows, arena_slots=held, slot_bytes=slot_bytes, seed=seed, evicts=evicts,
        )  # fmt: skip

    @contextmanager
    def served(self):
        self.module.library.host_start(ctypes.byref(self.host))
        try:
            yield
        finally:
            self.module.library.host_stop()

    def layer(self, layer, ids, begins_step=0, parts=4, blocks=6, resident=4, threads=64):
        """One layer: {row: 'whole' | 'failed'}; other bytes fail the test. Checks valid and ready."""
        memory, module = self.memory, self.module
        module.configure(16, 60.0)
        module.seed = int(self.rng.integers(1, 1 << 40))
        args = memory.resolve(module, layer, ids, begins_step=begins_step, threads=128)
        found = np.zeros(memory.plan.count, np.uint64)
        module.configure(resident, 60.0)
        for wave in range(memory.plan.waves + 1):  # one launch too many, as a graph has
            read = ReadArgs(layer=args, disk=self.disk.ctypes.data, found=found.ctypes.data, wave=wave, parts=parts)
            module.launch("read_rows", blocks, threads, read)
        out = {}
        for i, step in enumerate(memory.steps()):
            assert found[i] in (1, 2), f"step {i}, row {step.row}: bytes of another row, or torn ones"
            whole = found[i] == 1
            out[step.row] = "whole" if whole else "failed"
            if step.hit:
                assert whole
            else:
                assert memory.plan.ready[i] == (parts if whole else FAILED_ROW)
            if memory.row_of[step.slot] == step.row:
                assert memory.valid[step.slot] == whole
        return out

    def ids(self, tokens, top_k=4):
        return self.rng.integers(0, self.memory.experts, (tokens, top_k))

    def failures(self):
        return self.memory.failures.value

    def check_whole_pool(self):
        for slot, row in enumerate(self.memory.row_of):
            if row >= 0 and self.memory.valid[slot]:
                bytes_ = self.memory.slot_bytes
                assert (self.memory.pool[slot * bytes_ : (slot + 1) * bytes_] == self.disk[row]).all()
