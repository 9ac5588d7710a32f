"""How long calibrated packing of a model takes, and what it holds where: arithmetic on sizes and speeds."""

from dataclasses import dataclass

from moet.calibrate import TOKENS
from moet.calibrate.layer import SHARED_TOKENS, group_size


@dataclass(frozen=True)
class Sizes:
    """A model, as far as calibration goes.

    layers    MoE layers that are calibrated
    other     weights of a layer that are no routed experts
    dense     weights of all layers without routed experts together
    streams   residual streams (4 in DeepSeek V4)
    code_bytes  stored bytes of an expert's weight: 1 for FP8, 0.53 for MXFP4
    """

    hidden: int
    inter: int
    experts: int
    top_k: int
    layers: int
    other: int
    dense: int = 0
    streams: int = 1
    code_bytes: float = 1.0

    @property
    def expert(self) -> int:
        """Weights of an expert."""
        return 3 * self.hidden * self.inter

    @property
    def weights(self) -> int:
        """Of all routed experts."""
        return self.layers * self.experts * self.expert


@dataclass(frozen=True)
class Speeds:
    """A machine. flops: float32 operations a second of large products; factor_flops: of Cholesky factors; search: weights a
    second through the codebook's search; decode: weights a second from stored codes to float32 on the device, all workers
    together; read: bytes a second from the disk; rows: weights a second into row files (packing, checksums, writing)."""

    flops: float
    factor_flops: float
    search: float
    decode: float
    read: float
    rows: float


@dataclass(frozen=True)
class LayerSeconds:
    """Of one MoE layer, stage by stage."""

    read: float
    decode: float
    other: float
    statistics: float
    factors: float
    feedback: float
    search: float
    answers: float
    rows: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Memory:
    """Bytes. device: the most at a time; host: states and codes in RAM; disk: states beside the pack, two layers' worth for
    a moment."""

    device: int
    host: int
    disk: int


def layer_seconds(sizes: Sizes, speeds: Speeds, tokens: int = TOKENS) -> LayerSeconds:
    """Stages run one after the other; a GPU and a disk that overlap are faster than this. Both networks are taken to route
    alike; where they do not, native experts answer to more tokens."""
    h, f = sizes.hidden, sizes.inter
    weights = sizes.experts * sizes.expert
    pairs, shown = tokens * sizes.top_k, SHARED_TOKENS * sizes.experts
    moments = 2 * (pairs + tokens) * h * h + 2 * (pairs + shown) * (f * f + h * f)
    factors = sizes.experts * (4 / 3 * h**3 + 5 / 3 * f**3 + 2 * f * f * h)
    feedback = sizes.experts * (2 * f * h * h + h * f * f)
    return LayerSeconds(
        read=weights * sizes.code_bytes / speeds.read,
        decode=weights / speeds.decode,
        other=2 * 2 * tokens * sizes.other / speeds.flops,  # two networks
        statistics=(moments + (4 * pairs + 10 * shown) * h * f)
        / speeds.flops,  # gate and up at 2 bits; all three shown
        factors=factors / speeds.factor_flops,
        feedback=feedback / speeds.flops,
        search=weights / speeds.search,
        answers=(6 + 2) * pairs * h * f / speeds.flops,  # of native experts; of down at 2 bits
        rows=weights / speeds.rows,
    )


def model_seconds(sizes: Sizes, speeds: Speeds, tokens: int = TOKENS) -> float:
    """All layers."""
    dense = 2 * tokens * sizes.dense / speeds.flops
    return sizes.layers * layer_seconds(sizes, speeds, tokens).total + dense


def memory(sizes: Sizes, budget: int, tokens: int = TOKENS) -> Memory:
    """budget: of the experts that are encoded together (moet.calibrate.device.BUDGET)."""
    states = 4 * tokens * sizes.hidden * sizes.streams
    at_experts = 4 * tokens * sizes.hidden
    group = group_size(sizes.hidden, sizes.inter, sizes.experts, budget)
    codes = group * sizes.expert * (1 / 4 + 1 / 32)
    # In either network: what the experts are given and what they answer; and what the others' answers differ by.
    device = 5 * at_experts + max(budget, group_bytes(sizes)) + 4 * sizes.other
    return Memory(int(device), int(4 * states + codes), 2 * 2 * states)


def group_bytes(sizes: Sizes) -> int:
    """Of a single expert: the least that a group takes."""
    return 4 * (13 * sizes.hidden * sizes.inter + 6 * max(sizes.hidden, sizes.inter) ** 2)


GLM_5_2 = Sizes(6144, 2048, 256, 8, 75, other=214_000_000, dense=1_203_000_000, code_bytes=1.0)
"""GLM-5.2 in FP8: 725 of its 753 billion weights are routed experts'. `other` is attention, indexer, shared expert."""
V4_FLASH = Sizes(4096, 2048, 256, 6, 43, other=146_000_000, streams=4, code_bytes=0.53)
"""DeepSeek-V4-Flash in MXFP4."""
H200 = Speeds(flops=55e12, factor_flops=8.2e12, search=40.3e6, decode=6.5e9, read=3e9, rows=1.2e9)
"""One H200 and 16 CPU cores, `tcq2`: stages of docs/results/calibrate-glm-5.2.json, 6 experts together; `read` is assumed."""
