"""What the pager's kernels share with the host, byte for byte: ctypes twins of state.cuh, where every field is explained."""

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p

MAX_EXPERTS = 1024
"""Of a layer."""
MAX_WAVES = 64
MAX_STAGING = 1024
"""Staging slots of a class, at most."""
MAX_PAIRS = (1 << 20) - 1
"""(token, place) pairs of a launch, at most: route.cuh sums them in 20 bits."""
MAX_STRIPS = 512
"""Of 64 columns of the hidden size."""
WORKING = 0x7FFF_FFFF_FFFF_FFFF
"""SlotClass.stamp of a slot that is not in staging."""
FAILED_ROW = 0x8000_0000
MAILBOX_SIZE = 4096
FAILED_LOCATION = 0xFFFF_FFFF
RESOLVE_THREADS = 1024
"""Threads of resolve's, resolve_lookup's, resolve_scan's and absent_rows' one block: at least a layer's experts and a class's staging slots."""

COUNTERS = (
    "hits", "misses", "scan_hits", "scan_misses", "waves", "layers", "fetched_rows", "fetched_bytes", "arena_misses", "torn_copies", "failed_rows", "timeouts",
    "fetch_nanoseconds", "stall_nanoseconds", "steps",
)  # fmt: skip
"""Control.counter, in order."""


class SlotClass(ctypes.Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("rows", "slots", "staging", "ring")],
        *[(name, c_uint32) for name in ("hysteresis", "coldest")],
        *[(name, c_int64) for name in ("age_every", "touches", "slot_bytes", "newest", "oldest")],
        *[(name, c_uint64) for name in ("evictions", "admitted")],
        *[(name, c_void_p) for name in ("pool", "arena", "location", "slot_of", "row_of", "heat", "valid", "stamp")],
    ]


class Step(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("expert", "row", "slot", "wave", "hit", "pair_begin", "pair_count", "reserved")]


class Fetching(ctypes.Structure):
    _fields_ = [("location", c_uint64), ("request", c_uint32), ("phase", c_uint32)]


class Plan(ctypes.Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("count", "waves", "misses", "live_tokens")],
        ("wave_begin", c_int32 * (MAX_WAVES + 1)),
        ("reserved", c_int32),
        ("ticket", c_uint32 * MAX_WAVES),
        ("item", (c_uint32 * MAX_WAVES) * 3),
        ("drawn", c_uint32 * MAX_WAVES),
        ("stall", c_uint64 * MAX_WAVES),
        ("ready", c_uint32 * MAX_EXPERTS),
        ("copied", c_uint32 * MAX_EXPERTS),
        ("order", c_int32 * MAX_EXPERTS),
        ("made", c_uint32 * MAX_EXPERTS),
        ("finished", c_uint32 * MAX_STRIPS),
        ("fetching", Fetching * MAX_EXPERTS),
        ("steps", Step * MAX_EXPERTS),
        ("pairs", c_void_p),
        ("ring_ready", c_void_p),
    ]


class Absent(ctypes.Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("count", "waves", "ring", "reserved")],
        ("position", c_int32 * MAX_EXPERTS),
        ("ticket", c_uint32 * MAX_WAVES),
        ("drawn", c_uint32 * MAX_WAVES),
        ("ready", c_uint32 * MAX_EXPERTS),
        ("copied", c_uint32 * MAX_EXPERTS),
        ("order", c_int32 * MAX_EXPERTS),
        ("fetching", Fetching * MAX_EXPERTS),
        ("steps", Step * MAX_EXPERTS),
    ]


class Request(ctypes.Structure):
    _fields_ = [("cls", c_int32), ("row", c_int32), ("taken", c_uint32), ("reserved", c_uint32)]


class Mailbox(ctypes.Structure):
    _fields_ = [
        ("posted", c_uint32),
        ("stop", c_uint32),
        ("reserved", c_uint32 * 14),
        ("request", Request * MAILBOX_SIZE),
    ]


class Control(ctypes.Structure):
    _fields_ = [
        *[(name, c_uint32) for name in ("armed", "lookup_only", "posted", "timed_out")],
        ("limit_ns", c_uint64),
        ("counter", c_uint64 * (len(COUNTERS) + len(COUNTERS) % 2)),
        ("mailbox", c_void_p),
        ("failures", c_void_p),
    ]


class LayerArgs(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("slots", "control", "plan", "topk_ids", "kv_slots")],
        *[(name, c_int32) for name in ("tokens", "top_k", "experts", "cls", "first_row", "begins_step")],
    ]


class ScanArgs(ctypes.Structure):
    _fields_ = [("layer", LayerArgs), ("absent", c_void_p), ("wave", c_int32), ("ahead", c_int32)]


class LookupArgs(ctypes.Structure):
    _fields_ = [("layer", LayerArgs), ("list", c_void_p), ("capacity", c_int32), ("reserved", c_int32)]
