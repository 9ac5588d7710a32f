"""The expert geometries that are timed: hidden x intermediate size, experts, places a token, the function between the two GEMMs.

Sources: the models' config.json; DeepSeek-V4.1-Flash and Qwen3.8-Flash-Next from their published tables.
"""

from dataclasses import dataclass, field

from moet.layout import RowGeometry
from moet.models import Activation


@dataclass(frozen=True)
class Shape:
    """experts, top_k: of a layer. full: every column is timed (`gemm.columns.columns_of`)."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    full: bool = False
    biased: bool = False
    activation: Activation = field(default_factory=Activation)
    routing: str = "popular"

    def __post_init__(self) -> None:
        if min(self.hidden, self.inter) < 1 or not 0 < self.top_k <= self.experts or self.routing not in ("popular", "uniform"):
            raise ValueError(f"shape {self.name}: expected positive sizes, 0 < top_k <= experts, routing popular or uniform, found {self}")

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.inter

    def geometry(self, format: str) -> RowGeometry:
        return RowGeometry(format, self.hidden, self.inter, self.biased)


SHAPES = {
    s.name: s
    for s in (
        Shape("v4-flash", 4096, 2048, 256, 6, full=True, activation=Activation(limit=10.0)),
        Shape("glm-5.2", 6144, 2048, 256, 8, full=True),
        Shape("kimi-k2.7", 7168, 2048, 384, 8, full=True),
        Shape("v4-flash-uniform", 4096, 2048, 256, 6, activation=Activation(limit=10.0), routing="uniform"),
        Shape("v4.1-flash", 5120, 2304, 384, 6, activation=Activation(limit=10.0)),
        Shape("qwen3.8-flash-next", 2560, 640, 512, 10),
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, biased=True, activation=Activation("swiglu_oai", 7.0)),
    )
}
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
