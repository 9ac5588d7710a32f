"""Compiles kernels with the host's compiler and launches them in the emulator: the interface of
moet.kernels.gpu.compile.CudaModule, in host memory."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "src" / "moet" / "kernels"
HERE = Path(__file__).parent
CACHE = ROOT / ".pytest_cache" / "emulator"
# No contraction: the kernels say where they want an fma. Host and device share memory through u8 pointers. Each library has its own machine, which a GNU
# unique symbol would make one of the process.
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-DMOET_EMULATOR", "-ffp-contract=off"]
FLAGS += ["-fno-strict-aliasing", "-fno-gnu-unique", "-Wall", "-Wextra", "-Wno-unknown-pragmas", f"-I{HERE}"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

compiler = shutil.which("g++")


class EmulatorError(Exception):
    """A kernel does not compile, or its launch ended with an error of the emulator."""


def texts(path: Path, seen: dict[Path, str]) -> dict[Path, str]:
    """The file and everything it includes by a quoted name, by path."""
    path = path.resolve()
    if path not in seen:
        seen[path] = path.read_text()
        for name in INCLUDE.findall(seen[path]):
            beside = path.parent / name
            texts(beside if beside.exists() else HERE / name, seen)
    return seen


class EmulatedModule:
    """One translation unit of kernels.

    sources: paths, absolute or relative to src/moet/kernels, or texts that begin with '#' or '//', included one
    after the other. defines: macros. seed: 0 for threads that take turns, else the first launch's seed; each
    launch takes the next one. resident: blocks that run at a time. limit_s: seconds that a launch may take.
    Raises EmulatorError where the compiler is missing or refuses a source.
    """

    def __init__(
        self,
        sources: Sequence[str],
        defines: Mapping[str, int | str] | None = None,
        *,
        seed: int = 0,
        resident: int = 16,
        limit_s: float = 60.0,
    ) -> None:
        self.seed = seed
        self.library = ctypes.CDLL(str(build(sources, defines or {})))
        self.library.emulator_error.restype = ctypes.c_char_p
        self.configure(resident, limit_s)

    def configure(self, resident: int, limit_s: float) -> None:
        """Of later launches."""
        self._resident, self._limit_s = resident, limit_s

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        args: ctypes.Structure,
        shared_bytes: int = 0,
        stream: int = 0,
        early: bool = False,
    ) -> None:
        """Runs the kernel to its end; other threads of the process go on. Raises EmulatorError."""
        self.library.emulator_configure(ctypes.c_int(self._resident), ctypes.c_double(self._limit_s))
        wrong = self.library[kernel](
            ctypes.byref(args),
            ctypes.c_int(blocks),
            ctypes.c_int(threads),
            ctypes.c_int(shared_bytes),
            ctypes.c_uint64(self.seed),
        )
        self.seed += self.seed > 0
        if wrong:
            raise EmulatorError(f"{kernel}: {self.library.emulator_error().decode()}")


def build(sources: Sequence[str], defines: Mapping[str, int | str]) -> Path:
    """Path of the shared library, compiled unless its sources, flags and compiler are those of one that is there."""
    if compiler is None:
        raise EmulatorError("g++: expected a C++17 compiler on PATH, found none; install one")
    seen: dict[Path, str] = texts(HERE / "emulator.h", {})
    unit = []
    for source in sources:
        if source.lstrip().startswith(("#", "//")):
            unit.append(source)
            continue
        path = (KERNELS / source).resolve()
        texts(path, seen)
        unit.append(f'#include "{path}"')
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    key = hashlib.sha256(repr((compiler, flags, unit, sorted(seen.items()))).encode()).hexdigest()[:24]
    target = CACHE / f"{key}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        code, made = CACHE / f"{key}.{os.getpid()}.cpp", CACHE / f"{key}.{os.getpid()}.so"
        code.write_text("\n".join(unit) + "\n")
        run = subprocess.run(
            [compiler, *flags, str(code), "-o", str(made)], check=False, capture_output=True, text=True
        )
        code.unlink()
        if run.returncode:
            raise EmulatorError(run.stderr)
        made.replace(target)
    return target
