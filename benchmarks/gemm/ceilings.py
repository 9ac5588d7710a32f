"""What the GPU gives plain programs in this run: reading, copying, a large bf16 product."""

import ctypes
import statistics
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch

from gemm.bounds import Ceilings
from moet.kernels.gpu.module import CudaModule, Module

BYTES, SIDE, SAMPLES = 4 << 30, 8192, 12
READERS = ((256, 2), (256, 4), (256, 8), (512, 1), (512, 2), (512, 4), (1024, 1), (1024, 2))
"""Threads of a block and blocks of a multiprocessor that are tried; the fastest is what memory gives."""
SOURCE = str(Path(__file__).with_name("read.cuh").resolve())


class ReadArgs(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("vectors", c_int64), ("never", c_void_p)]


def read(module: Module, data: torch.Tensor, never: torch.Tensor, threads: int, blocks: int, stream: int = 0) -> None:
    """Queues a read of all of `data`, uint8 [multiple of 16]. never: int32 [1], see read.cuh."""
    module.launch("read_bytes", blocks, threads, ReadArgs(data.data_ptr(), data.numel() // 16, never.data_ptr()), stream=stream)


def _seconds(work: Callable[[], object], samples: int = SAMPLES) -> tuple[float, list[float]]:
    found = []
    for _ in range(samples + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[2:]), found[2:]


def _memory(device: torch.device) -> tuple[float, list[float], float, list[float]]:
    """Seconds to read BYTES, and to copy half of them: medians of the fastest reader and of the copy, with their samples."""
    data = torch.empty(BYTES, dtype=torch.uint8, device=device)
    data.view(torch.int64).random_(-(1 << 63), (1 << 63) - 1)
    never, half = torch.zeros(1, dtype=torch.int32, device=device), BYTES // 2
    module, stream = CudaModule([SOURCE], {}, device.index or 0), torch.cuda.current_stream(device).cuda_stream
    count = torch.cuda.get_device_properties(device).multi_processor_count
    readers = [_seconds(lambda t=threads, b=blocks: read(module, data, never, t, b * count, stream)) for threads, blocks in READERS]
    return *min(readers), *_seconds(lambda: data[half:].copy_(data[:half]))


def measure(device: torch.device) -> tuple[Ceilings, dict[str, object]]:
    """Medians, and the samples in GB/s and TFLOP/s. The product's operands are random: zeros draw less power and run faster."""
    read_s, reads, copy_s, copies = _memory(device)
    a, b = (torch.randn((SIDE, SIDE), device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    product_s, products = _seconds(lambda: torch.mm(a, b, out=out))
    flops = 2.0 * SIDE**3
    samples = {
        "read_gb_per_s": [round(BYTES / s / 1e9, 1) for s in reads], "copy_gb_per_s": [round(BYTES / s / 1e9, 1) for s in copies],
        "bf16_tflops": [round(flops / s / 1e12, 1) for s in products],
    }  # fmt: skip
    return Ceilings(BYTES / read_s, BYTES / copy_s, flops / product_s), samples
