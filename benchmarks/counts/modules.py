"""The modules of kernels that are counted, and a hash of their code that comments and blanks do not change."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from counts.throughput import ARCHITECTURES
from moet.kernels.expert_mlp.cuda import SOURCES
from moet.kernels.expert_mlp.scaled import SCALED_FORMATS, SCALED_SOURCES
from moet.kernels.gpu.source import flatten
from moet.layout import FORMATS

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Module:
    """formats: one compilation for each; "" for kernels that read no rows."""

    sources: tuple[str, ...]
    formats: tuple[str, ...]
    archs: tuple[str, ...] = tuple(ARCHITECTURES)


MODULES = {
    "expert_mlp": Module(SOURCES, FORMATS),
    "expert_mlp_scaled": Module(SCALED_SOURCES, SCALED_FORMATS, ("sm_89", "sm_90a", "sm_120a")),
    "pager": Module(("paging/resolve.cuh", "paging/scan.cuh", "expert_mlp/begin.cuh"), ("",)),
}


def terms(kernel: str, format: str, arch: str) -> int:
    """A fragments that a weight is in: `mlp_small` multiplies levels of 16 codes as the sum of two bytes (kTerms of integers.cuh), but for tcq2 where it has a table."""
    return 2 if kernel == "mlp_small" and (format in ("mxfp4", "nvfp4") or (format == "tcq2" and arch != "sm_90a")) else 1


def code_hash(sources: Sequence[str]) -> str:
    """Of flatten(sources): 16 hexadecimal digits."""
    return hashlib.sha256(" ".join(_COMMENT.sub(" ", flatten(sources)).split()).encode()).hexdigest()[:16]
