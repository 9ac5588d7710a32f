"""llama.cpp's expert layer, driven through ggml's C API: the graph that its `build_moe_ffn` makes, on tensors of our choice.

Needs the shared libraries of llama.cpp, as the package llama-cpp-python installs them in llama_cpp/lib (libggml-base.so, libggml-cpu.so).
"""

import ctypes
from pathlib import Path
from typing import Self

import numpy as np

# ggml.h: enum ggml_type and the size of a block of 256 weights. Every bit pattern is a valid weight, given sane float16 scales.
TYPES = {"Q2_K": (10, 84), "IQ2_XXS": (16, 66), "IQ2_XS": (17, 74)}
F32, I32 = 0, 26


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def random_weights(kind: str, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [blocks, block size]: random codes, float16 scales of about 0.01."""
    size = TYPES[kind][1]
    data = rng.integers(0, 256, (blocks, size), np.uint8)
    at = slice(80, 84) if kind == "Q2_K" else slice(0, 2)   # Q2_K ends with d and dmin, the others begin with d
    data[:, at] = np.tile(np.array([0.01], np.float16).view(np.uint8), (at.stop - at.start) // 2)
    return data


class GgmlExperts:
    """`experts` experts of one layer in one quantization; `run` computes one step of top-k experts for some tokens."""

    def __init__(self, library: Path, kind: str, hidden: int, inter: int, experts: int, threads: int) -> None:
        self._load(library)
        g, self.hidden, self.experts = self._g, hidden, experts
        number, size = TYPES[kind]
        self.expert_bytes = 3 * hidden * inter // 256 * size
        self._weights = g.ggml_init(_InitParams(self.expert_bytes * experts + (1 << 20), None, False))
        rng = np.random.default_rng(0)
        tensors = []
        for k, n in ((hidden, inter), (hidden, inter), (inter, hidden)):   # gate, up, down: [experts][n][k]
            tensor = g.ggml_new_tensor_3d(self._weights, number, k, n, experts)
            one = random_weights(kind, k * n // 256, rng)
            data = g.ggml_get_data(tensor)
            for e in range(experts):
                ctypes.memmove(data + e * one.nbytes, one.ctypes.data, one.nbytes)
            tensors.append(tensor)
        self._gate, self._up, self._down = tensors
        params = ctypes.create_string_buffer(4096)   # larger than any version's ggml_threadpool_params
        g.ggml_threadpool_params_init(params, threads)
        self._pool = g.ggml_threadpool_new(params)
        self._backend = g.ggml_backend_cpu_init()
        g.ggml_backend_cpu_set_n_threads(self._backend, threads)
        g.ggml_backend_cpu_set_threadpool(self._backend, self._pool)
        self._graphs: dict[tuple[int, int], tuple] = {}

    def _load(self, library: Path) -> None:
        self._base = ctypes.CDLL(str(library / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(library / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        self._g = self
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        for source, name, result, arguments in (
            (self._base, "ggml_init", pointer, [_InitParams]),
            (self._base, "ggml_free", None, [pointer]),
            (self._base, "ggml_new_tensor_2d", pointer, [pointer, i32, i64, i64]),
            (self._base, "ggml_new_tensor_3d", pointer, [pointer, i32, i64, i64, i64]),
            (self._base, "ggml_get_data", pointer, [pointer]),
            (self._base, "ggml_mul_mat_id", pointer, [pointer, pointer, pointer, pointer]),
            (self._base, "ggml_swiglu_split", pointer, [pointer, pointer, pointer]),
            (self._base, "ggml_new_graph", pointer, [pointer]),
            (self._base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (self._base, "ggml_backend_graph_compute", i32, [pointer, pointer]),
            (self._base, "ggml_backend_free", None, [pointer]),
            (self._base, "ggml_threadpool_params_init", None, [pointer, i32]),
            (self._cpu, "ggml_threadpool_new", pointer, [pointer]),
            (self._cpu, "ggml_threadpool_free", None, [pointer]),
            (self._cpu, "ggml_backend_cpu_init", pointer, []),
            (self._cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, i32]),
            (self._cpu, "ggml_backend_cpu_set_threadpool", None, [pointer, pointer]),
        ):
            function = getattr(source, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def _graph(self, tokens: int, top_k: int) -> tuple:
        if (tokens, top_k) not in self._graphs:
            g = self._g
            context = g.ggml_init(_InitParams(64 << 20, None, False))
            x = g.ggml_new_tensor_3d(context, F32, self.hidden, 1, tokens)
            ids = g.ggml_new_tensor_2d(context, I32, top_k, tokens)
            gate, up = (g.ggml_mul_mat_id(context, w, x, ids) for w in (self._gate, self._up))
            out = g.ggml_mul_mat_id(context, self._down, g.ggml_swiglu_split(context, gate, up), ids)
            graph = g.ggml_new_graph(context)
            g.ggml_build_forward_expand(graph, out)
            self._graphs[tokens, top_k] = (context, g.ggml_get_data(x), g.ggml_get_data(ids), graph, g.ggml_get_data(out))
        return self._graphs[tokens, top_k]

    def run(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """float32 [tokens, k, hidden]: the experts' results before the weights. x: float32 [tokens, hidden]; ids: int32 [tokens, k]."""
        _, x_data, ids_data, graph, out = self._graph(*ids.shape)
        ctypes.memmove(x_data, x.ctypes.data, x.nbytes)
        ctypes.memmove(ids_data, ids.ctypes.data, ids.nbytes)
        if self._g.ggml_backend_graph_compute(self._backend, graph) != 0:
            raise RuntimeError("ggml: the graph did not compute")
        return np.ctypeslib.as_array(ctypes.cast(out, ctypes.POINTER(ctypes.c_float)), (*ids.shape, self.hidden))

    def close(self) -> None:
        for context, *_ in self._graphs.values():
            self._g.ggml_free(context)
        self._g.ggml_backend_free(self._backend)
        self._g.ggml_threadpool_free(self._pool)
        self._g.ggml_free(self._weights)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
