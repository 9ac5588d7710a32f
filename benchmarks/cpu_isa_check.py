"""Checks on this machine that all instruction sets of the kernels give the same bits, and times them. Needs numpy and the shared library only:

    python benchmarks/cpu_isa_check.py src/moet/_native.so [docs/results/cpu_isa.json]

Rows are random bytes with tame scales; sizes have padding. Exits 1 at the first difference, and says which instruction sets it could compare.
"""

import ctypes
import sys
import time

import numpy as np

FORMATS = {"sym2": (2, 64), "mxfp4": (4, 64), "nvfp4": (4, 128), "fp8": (8, 16), "fp8_row": (8, 256), "bf16": (16, 0), "tcq2": (2, 64)}   # bits, scale bytes a block
ACTIVATIONS = ("fp32", "int8", "int16", "int24")


class Activation(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("limited", ctypes.c_int32), ("limit", ctypes.c_float), ("alpha", ctypes.c_float)]


def random_segments(format: str, hidden: int, inter: int, rng: np.random.Generator) -> list[np.ndarray]:
    """w13, w2 and extras of a biased row, each of its own memory (native/include/row.h)."""
    bits, scale_bytes = FORMATS[format]
    hidden_padded, tiles, block = -(-hidden // 64) * 64, -(-inter // 32), 256 * bits + scale_bytes

    def blocks(count: int) -> np.ndarray:
        data = rng.integers(0, 256, (count, block), np.uint8)
        codes, scales = data[:, : 256 * bits], data[:, 256 * bits :]
        if bits == 8:
            codes[codes & 0x7F == 0x7F] = 0
        if format == "bf16":
            codes.view(np.uint16)[:] = (rng.standard_normal((count, 2048)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif format in ("sym2", "mxfp4"):
            scales[:] = rng.integers(0, 130, scales.shape)   # byte 0 among them
        elif format == "tcq2":
            scales[:] = rng.integers(0, 140, scales.shape)
        elif format == "nvfp4":
            scales[:] = rng.integers(0, 0x7F, scales.shape)
        else:
            scales.view(np.float32)[:] = rng.uniform(0.001, 0.01, (count, scale_bytes // 4)).astype(np.float32)
        return data.reshape(-1)

    w13 = np.concatenate([np.concatenate([blocks(hidden_padded // 32), rng.standard_normal(64).astype(np.float32).view(np.uint8)]) for _ in range(tiles)])
    extras = np.concatenate([np.array([0.5, 0.25, 0.125, 0], np.float32), rng.standard_normal(hidden_padded).astype(np.float32)])
    return [w13, np.concatenate([blocks(hidden_padded // 64) for _ in range(tiles)]), extras.view(np.uint8)]


class Kernels:
    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.handle, self._error = ctypes.c_void_p(), ctypes.create_string_buffer(1024)
        self._call("moet_moe_open", 2, ctypes.byref(self.handle))

    def _call(self, name: str, *arguments) -> None:
        if getattr(self.library, name)(*arguments, self._error, ctypes.c_size_t(1024)):
            raise RuntimeError(self._error.value.decode())

    def set_isa(self, name: str) -> None:
        self._call("moet_set_isa", name.encode())

    def expert(self, format: str, hidden: int, inter: int, segments: list[np.ndarray], x: np.ndarray, acts: int, kind: int) -> np.ndarray:
        sizes = (ctypes.c_int32 * 4)(list(FORMATS).index(format), hidden, inter, 1)
        pointers = (ctypes.c_void_p * 3)(*[s.ctypes.data for s in segments])
        out = np.full((len(x), hidden), np.nan, np.float32)
        self._call(
            "moet_expert_mlp", self.handle, sizes, pointers, 0, -(-inter // 32), 1, ctypes.byref(Activation(kind, 1, 7.0, 1.702)), acts,
            ctypes.c_void_p(x.ctypes.data), len(x), ctypes.c_void_p(out.ctypes.data),
        )  # fmt: skip
        return out


def main() -> None:
    kernels, rng = Kernels(sys.argv[1]), np.random.default_rng(0)
    found = []
    for name in ("portable", "avx2", "avx512"):
        try:
            kernels.set_isa(name)
            found.append(name)
        except RuntimeError as e:
            print(f"{name}: not here ({e})")
    compared = 0
    for format in FORMATS:
        for hidden, inter in ((64, 32), (192, 96), (352, 208)):   # the last has half a tile of padding
            segments = random_segments(format, hidden, inter, rng)
            for tokens in (1, 3, 7, 53):
                x = rng.standard_normal((tokens, hidden)).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 3))
                for acts in range(len(ACTIVATIONS)):
                    for kind in (0, 1):
                        results = {}
                        for name in found:
                            kernels.set_isa(name)
                            results[name] = kernels.expert(format, hidden, inter, segments, x, acts, kind).tobytes()
                        compared += 1
                        if len(set(results.values())) != 1 or np.isnan(np.frombuffer(results[found[0]], np.float32)).any():
                            sys.exit(f"DIFFERENT: {format}, hidden {hidden}, inter {inter}, {tokens} tokens, {ACTIVATIONS[acts]}, activation {kind}")
    print(f"same bits: {compared} cases on {', '.join(found)}")
    rates: dict[str, dict[str, str]] = {}
    for format in FORMATS:
        segments = random_segments(format, 4096, 2048, rng)
        x = rng.standard_normal((1, 4096)).astype(np.float32)
        for name in found[1:]:
            kernels.set_isa(name)
            times = {}
            for acts in range(4 if FORMATS[format][0] <= 4 else 1):
                samples = []
                for _ in range(7):
                    start = time.perf_counter()
                    kernels.expert(format, 4096, 2048, segments, x, acts, 0)
                    samples.append(time.perf_counter() - start)
                times[ACTIVATIONS[acts]] = f"{3 * 4096 * 2048 / min(samples) / 1e9:.1f}"
            rates[f"{format}, {name}"] = times
            print(f"{format:8} {name:7} weights/ns, 2 threads, 1 token, caches warm: {times}")
    if len(sys.argv) > 2:
        from pathlib import Path

        import record

        what = f"CPU kernels: cases (formats, sizes, tokens, activations) with the same bits on {', '.join(found)}"
        claims = [record.Claim("B2", what, compared, f"of {compared}", compared, "==")]   # a difference has ended the program above
        record.write(Path(sys.argv[2]), claims, {"weights per ns, 2 threads, 1 token, caches warm": rates}, "random rows, every activation format")


if __name__ == "__main__":
    main()
