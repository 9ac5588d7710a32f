"""Kernel sources as one text: NVRTC reads no files, and the text is what a compiled module is known by."""

import re
from collections.abc import Sequence
from pathlib import Path

KERNELS = Path(__file__).parents[1]
_INCLUDE = re.compile(r'#include "([^"]+)"\s*$')


def flatten(sources: Sequence[str]) -> str:
    """The files `sources`, relative to moet/kernels ("expert_mlp/small.cuh"), with each `#include "..."` in its place. Includes of the emulator stay.

    A file stands once, but where it is included under an #if that may leave it out: then again at the next include, behind a guard.
    """
    numbers: dict[Path, int] = {}

    def text(path: Path, seen: set[Path]) -> list[str]:
        path, out, depth = path.resolve(), [], 0
        if path in seen:
            return []
        seen.add(path)
        guard = f"MOET_FILE_{numbers.setdefault(path, len(numbers))}"
        for line in path.read_text().splitlines():
            depth += line.startswith("#if") - line.startswith("#endif")
            found = _INCLUDE.match(line)
            if found and found[1] != "emulator.h":
                out += text(path.parent / found[1], set(seen) if depth else seen)
            elif line != "#pragma once":
                out.append(line)
        return [f"#ifndef {guard}", f"#define {guard}", *out, "#endif"]

    seen: set[Path] = set()
    return "\n".join(line for source in sources for line in text(KERNELS / source, seen)) + "\n"
