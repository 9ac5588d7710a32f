"""Kernel sources as one text: NVRTC reads no files, and the text is what a compiled module is known by."""

import re
from collections.abc import Sequence
from pathlib import Path

KERNELS = Path(__file__).parents[1]
_INCLUDE = re.compile(r'^#include "([^"]+)"\s*$', re.MULTILINE)


def flatten(sources: Sequence[str]) -> str:
    """The files `sources`, relative to moet/kernels ("expert_mlp/small.cuh"), with each `#include "..."` in its place once. Includes of the emulator stay."""
    seen: set[Path] = set()

    def text(path: Path) -> str:
        path = path.resolve()
        if path in seen:
            return ""
        seen.add(path)
        return _INCLUDE.sub(lambda m: m[0] if m[1] == "emulator.h" else text(path.parent / m[1]), path.read_text().replace("#pragma once\n", ""))

    return "\n".join(text(KERNELS / source) for source in sources)
