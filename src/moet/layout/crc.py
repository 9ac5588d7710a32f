"""CRC-32C (Castagnoli), the checksum of a row's parts; native, about 16 GB/s from cache."""

import ctypes
import functools

import numpy as np

from moet import native


@functools.cache
def _functions():
    crc, combine = native.lib().moet_crc32c, native.lib().moet_crc32c_combine
    crc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_int32]
    combine.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
    crc.restype = combine.restype = ctypes.c_uint32
    return crc, combine


def crc32c(buffer: bytes | bytearray | memoryview | np.ndarray, seed: int = 0, *, portable: bool = False) -> int:
    """CRC-32C of a contiguous buffer. `seed` is the CRC of the bytes before it: crc32c(b, crc32c(a)) == crc32c(a + b).

    portable: the table version, whatever the CPU has. Raises ValueError if the buffer is not contiguous.
    """
    data = np.frombuffer(buffer, np.uint8)
    return _functions()[0](data.ctypes.data, data.nbytes, seed, portable)


def crc32c_combine(crc_a: int, crc_b: int, size_b: int) -> int:
    """CRC of a + b from both CRCs and the length of b in bytes."""
    return _functions()[1](crc_a, crc_b, size_b)
