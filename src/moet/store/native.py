"""ctypes side of native/store/abi.cpp (moet_pager_*) and native/store/host_store_abi.cpp (moet_host_*)."""

import ctypes
import functools

from moet import native

_P = ctypes.POINTER
_i32, _i64, _u32, _u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
_handle = ctypes.c_void_p
_error = [ctypes.c_char_p, ctypes.c_size_t]


class CLayer(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("data_offset", _i64)] + [
        (name, _i32) for name in ("experts", "format", "hidden", "inter", "biased", "index")
    ]


class COptions(ctypes.Structure):
    _fields_ = (
        [(name, _i64) for name in ("budget_bytes", "chunk_bytes", "age_every")]
        + [("counters_path", ctypes.c_char_p)]
        + [(name, _i32) for name in ("rank", "world", "io_threads", "direct_io", "verify")]
        + [(name, _i32) for name in ("staging_slots", "hysteresis", "reserved")]
    )


class CHostOptions(ctypes.Structure):
    _fields_ = (
        [(name, _i64) for name in ("ram_bytes", "chunk_bytes")]
        + [("counters_path", ctypes.c_char_p)]
        + [(name, _i32) for name in ("rank", "world", "io_threads", "direct_io", "verify", "reserved")]
    )


_PAGER = {
    "open": [_P(CLayer), _i32, _P(COptions), _P(_handle)],
    "begin": [_handle, _i32, _P(_i32), _i32, _i32],
    "take": [_handle, _P(_i32), _P(ctypes.c_void_p), _i32, _P(_i32)],
    "end": [_handle],
    "put": [_handle, _i32, _i32, ctypes.c_void_p],
    "preheat": [_handle, _i64, _i32, _P(_i64)],
    "heat_get": [_handle, _P(_u32)],
    "heat_set": [_handle, _P(_u32)],
    "counters": [_handle, _P(_u64), _i32],
    "warning": [_handle, ctypes.c_char_p, ctypes.c_size_t],
    "classes": [_handle, _P(_i64), _i32, _P(_i32)],
    "plan": [_handle, _P(_i32), _i32, _P(_i32)],
    "slot": [_handle, _i32, _i32, _P(_i32), _P(_i32)],
    "inject": [_handle, _i32, _i32, _i32, _i64, _i64],
}
_HOST = {
    "open": [_P(CLayer), _i32, _P(CHostOptions), _P(_handle)],
    "classes": [_handle, _P(_i64), _i32, _P(_i32)],
    "layout": [_handle, _i32, _P(_i64)],
    "control": [_handle, _P(_i64)],
    "plan_fill": [_handle, _P(_i64)],
    "fill": [_handle, _i64, _P(_i64)],
    "put": [_handle, _i32, _i32, ctypes.c_void_p],
    "row": [_handle, _i32, _i32, _P(_i64)],
    "heat_get": [_handle, _P(_u32)],
    "heat_set": [_handle, _P(_u32)],
    "counters": [_handle, _P(_u64), _i32],
    "warning": [_handle, ctypes.c_char_p, ctypes.c_size_t],
    "failure": [_handle, ctypes.c_char_p, ctypes.c_size_t],
    "prefault": [ctypes.c_void_p, _i64, _i32],
    "inject": [_handle, _i32, _i32, _i32, _i64, _i64],
    "stop_server": [_handle],
}


@functools.cache
def lib() -> ctypes.CDLL:
    """The native library with the store's functions typed."""
    library = native.lib()
    library.moet_counter_names.restype = ctypes.c_char_p
    for prefix, functions in (("pager", _PAGER), ("host", _HOST)):
        close = getattr(library, f"moet_{prefix}_close")
        close.argtypes, close.restype = [_handle], None
        for name, arguments in functions.items():
            function = getattr(library, f"moet_{prefix}_{name}")
            function.argtypes, function.restype = arguments + _error, _i32
    return library
