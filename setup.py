"""Builds native/ into src/moet/_native.so: one shared library with a plain C ABI, no Python ABI, so one wheel serves every Python 3.11+."""

import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
# -ffp-contract=off: the compiler may not fuse a*b+c on its own, or the portable path would differ from AVX2 in the last bit.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-pthread"]


class BuildNative(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        cxx = os.environ.get("CXX", "g++")
        temp = Path(self.build_temp)
        newest_header = max((h.stat().st_mtime for h in (ROOT / "native").rglob("*.h")), default=0)

        def compile_one(source: str) -> str:
            target = temp / (source.replace("/", "_") + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.exists() and target.stat().st_mtime > max(Path(source).stat().st_mtime, newest_header)
            if not fresh:
                subprocess.run([cxx, *FLAGS, "-c", source, "-o", str(target)], check=True)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([cxx, "-shared", "-pthread", *objects, "-o", str(output)], check=True)


class AnyPythonWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(
    ext_modules=[Extension("moet._native", sorted(str(p.relative_to(ROOT)) for p in (ROOT / "native").rglob("*.cpp")))],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
)
