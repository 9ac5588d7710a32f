"""The least time that a call can take: the bytes of the experts it reads at the measured read bandwidth, or its products at the measured peak. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemm.shapes import Shape


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run: bytes a second of a kernel that only reads, and of a copy (bytes read plus bytes written); FLOP a second of a large bf16 product."""

    read: float
    copy: float
    flops: float


@dataclass(frozen=True)
class Bound:
    """Seconds of a call, the mean over calls. limit: "bytes" or "flops", whichever is larger."""

    bytes_s: float
    flops_s: float

    @property
    def seconds(self) -> float:
        return max(self.bytes_s, self.flops_s)

    @property
    def limit(self) -> str:
        return "bytes" if self.bytes_s >= self.flops_s else "flops"


def flop(shape: Shape, tokens: int) -> int:
    """Of a call: a multiplication and an addition for each weight of each (token, place) pair."""
    return 2 * shape.weights * tokens * shape.top_k


def bound(shape: Shape, tokens: int, distinct: Sequence[int], expert_bytes: float, ceilings: Ceilings) -> Bound:
    """distinct: experts that each call reads; expert_bytes: of one expert's weights and scales in the column's format."""
    read = sum(distinct) / len(distinct) * expert_bytes
    return Bound(read / ceilings.read, flop(shape, tokens) / ceilings.flops)
