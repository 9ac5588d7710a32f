"""Pinned memory: pages that a GPU reads by their host address. Registered in chunks, each after several threads made its pages."""

import os
import resource
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from moet import native
from moet.errors import StoreError
from moet.store.budget import Machine, size
from moet.store.native import lib

CHUNK_BYTES = 1 << 30
PREFAULT_THREADS = 8
HEADROOM = 2 << 30
GROWTH_S = 5.0
Register = Callable[[int, int], Callable[[], None] | None]
"""(address, bytes) -> what undoes it. Raises whatever it likes: register_all makes a StoreError of it."""


def register_all(
    register: Register, pieces: Iterable[tuple[int, int, int]], undo: list[Callable[[], None]]
) -> None:
    """Registers memory: (address, bytes, unit) each, in chunks of about 1 GiB cut at multiples of the unit, so that a row lies in
    one registration. While a chunk is registered, the pages of the next one are made. What undoes each goes to `undo`.

    Raises StoreError that names bytes and limits if there is no memory or `register` fails."""
    chunks = []
    for address, length, unit in pieces:
        step = max(CHUNK_BYTES // unit, 1) * unit if unit else length
        chunks += [(address + at, min(step, length - at)) for at in range(0, length, step or 1)]
    total, done = sum(n for _, n in chunks), 0
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(_make_pages, *chunks[0]) if chunks else None
        for i, (address, length) in enumerate(chunks):
            ready.result()
            if i + 1 < len(chunks):
                ready = pool.submit(_make_pages, *chunks[i + 1])
            try:
                undone = register(address, length)
            except Exception as e:
                raise StoreError(_why(e, length, done, total)) from e
            if undone is not None:
                undo.append(undone)
            done += length


def _make_pages(address: int, length: int) -> None:
    # Memory that grows with use (budget.Machine.free) does so at a few GiB/s: several threads must not run ahead of it.
    machine, end = Machine.read(), time.monotonic() + GROWTH_S
    while machine.available < max(length, min(length + HEADROOM, machine.free)) and time.monotonic() < end:
        time.sleep(0.02)
        machine = Machine.read()
    if length > machine.free:
        raise StoreError(
            f"pinned memory: expected {size(length)} more, found {machine}. Lower the RAM budget, or use `auto`"
        )
    threads = min(PREFAULT_THREADS, len(os.sched_getaffinity(0)))
    native.call(lib().moet_host_prefault, address, length, threads, error=StoreError)


def _why(error: Exception, length: int, done: int, total: int) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    return (
        f"pinned memory: expected {size(total)} to be registered with the GPU, found that {size(length)} after the first "
        f"{size(done)} were refused: {error}. The memlock limit is {limit} (`ulimit -l`); raise it (`--ulimit memlock=-1` for a "
        "container) or lower the RAM budget"
    )


def cuda_register(address: int, length: int) -> Callable[[], None]:
    """Pins memory for all CUDA contexts of the process (portable, mapped); returns what unpins it. Where the thread has no current
    context, the primary one of device 0 becomes it.

    Raises StoreError with CUDA's name of the error, or if the device would see the memory under another address."""
    from cuda.bindings import driver  # comes with torch on a machine that has a GPU

    def check(result: tuple) -> object:
        code, *values = result
        if code != driver.CUresult.CUDA_SUCCESS:
            raise StoreError(f"{code.name} ({int(code)})")
        return values[0] if values else None

    def need_context() -> None:
        check(driver.cuInit(0))
        if int(check(driver.cuCtxGetCurrent())) == 0:
            check(
                driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0)))))
            )

    def undo() -> None:
        need_context()
        check(driver.cuMemHostUnregister(address))

    need_context()
    check(
        driver.cuMemHostRegister(
            address, length, driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        )
    )
    seen = int(check(driver.cuMemHostGetDevicePointer(address, 0)))
    if seen != address:
        undo()
        raise StoreError(
            f"the device sees host address {address:#x} as {seen:#x}; one address for both is needed"
        )
    return undo
