"""Loads the native library (C ABI) once, and turns its error convention into exceptions."""

import ctypes
import functools
import os
from pathlib import Path

from moet.errors import MoetError

ERROR_BYTES = 1024


@functools.cache
def lib() -> ctypes.CDLL:
    """The native library. MOET_NATIVE names another build of it (debugging only). Raises MoetError if it is not there or does not load."""
    path = Path(os.environ.get("MOET_NATIVE") or Path(__file__).with_name("_native.so"))
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise MoetError(
            f"native library {path}: expected a shared library built from native/, found: {e}. "
            "Install moet with pip (it needs a C++17 compiler), or run `python setup.py build_ext --inplace`."
        ) from e


def call(function, *args, error: type[MoetError] = MoetError) -> None:
    """Calls `function(*args, err, err_len)`; raises `error` with the native message if it does not return 0."""
    message = ctypes.create_string_buffer(ERROR_BYTES)
    if function(*args, message, ctypes.c_size_t(ERROR_BYTES)) != 0:
        raise error(message.value.decode(errors="replace"))
