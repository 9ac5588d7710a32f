"""The launches of a layer's expert MLP on a GPU: which kernels for how many tokens, with how many blocks, in which order."""

import functools
from dataclasses import dataclass
from typing import Literal

from moet.config import PrefillActivations
from moet.kernels.expert_mlp.cuda import NUMBERS, MlpArgs, padded
from moet.kernels.expert_mlp.scaled import is_scaled
from moet.kernels.gpu.module import Module
from moet.kernels.paging.state import RESOLVE_THREADS
from moet.layout import RowGeometry

TABLE_END = 207 << 10
"""Of the dynamic shared memory: where tcq2's table ends (integers.cuh), 80 + 128 KiB from where the system's 1 KiB begins."""
GROUP_BYTES = {4: 5952, 8: 10496}
"""Of struct Group (group.cuh), by the pairs of an item."""
MOST_STAGES = 3
COMBINE_THREADS = PREPARE_THREADS = 256
COMBINED_TOKENS = 32
"""Up to here the small kernels add up a token's places as well: the warp that finishes a strip then has at most eight rounds of loads to do."""
QUANTIZED = 2
"""Tokens of a block that quantizes, at 32 threads for 128 columns: as long as the plan takes with few of them. A block of `begin` keeps one of mlp_small off its multiprocessor until it has ended."""
MANY = 9
"""Pairs of an expert from which on the large kernels are the faster ones. On an H200 an expert of DeepSeek-V4-Flash's size takes them 5 us, and mlp_small 3 us for each four pairs."""
MIXED_TOKENS = 8192
"""Up to here experts are parted by MANY: of 4,096 tokens of DeepSeek-V4-Flash half the experts have fewer. Planes of x and of what is between the GEMMs take 22 % more scratch, 150 MB for so many tokens."""
LARGE = 4
"""Where kernels cannot part experts: pairs an expert, on average, from which on a prefill takes the large ones for all."""
SPARED = 4
"""Multiprocessors that a large GEMM leaves to the copies beside it."""


Size = Literal["small", "mixed", "large"]
"""Of a batch: the small kernels for all its experts, for those with fewer than MANY pairs, for none."""
PAIRS: dict[Size, int] = {"small": 2**31 - 1, "mixed": MANY, "large": 1}
"""Of an expert, from which on the large kernels take it."""


@dataclass(frozen=True)
class SmallKernel:
    """mlp_small of small.cuh for a row format. arch: compute capability, 90 for 9.0."""

    format: str
    arch: int

    @property
    def integers(self) -> bool:
        """Whether its arithmetic is integers.cuh, with items of four pairs, or floats.cuh, with eight."""
        return NUMBERS[self.format] == 0

    @property
    def groups(self) -> int:
        """kGroups of group.cuh: of warps that take an item together, of a block."""
        if self.integers:
            return 4 if self.arch == 90 else 3
        return 1 if self.format == "bf16" and _shared_limit(self.arch) < 128 << 10 else 2

    @property
    def threads(self) -> int:
        """Of a group four warps compute, one dispatches and one finishes."""
        return 32 * self.groups * 6

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of stream.cuh: a table, the groups, the stages of their weights."""
        groups = self.groups * GROUP_BYTES[4 if self.integers else 8]
        if self.has_table:
            return TABLE_END
        stage = self.groups * 4 * _piece_bytes(self.format)
        return groups + min(MOST_STAGES, (_shared_limit(self.arch) - groups) // stage) * stage

    @property
    def has_table(self) -> bool:
        """kTable of integers.cuh."""
        return self.format == "tcq2" and self.arch in (90, 100)


@functools.cache
def _piece_bytes(format: str) -> int:
    """kPiece of stream.cuh, two blocks: a chunk of 64 rows x 64 columns on its way through shared memory. Every launch asks."""
    return 2 * RowGeometry(format, 64, 32, False).block_bytes


def _shared_limit(arch: int) -> int:
    """Bytes of dynamic shared memory that a block may have, beside 256 of its variables."""
    return ({80: 163, 90: 227, 100: 227}.get(arch, 99) << 10) - 256


@dataclass(frozen=True)
class ExpertKernels:
    """Queues the launches of layers of one row format. pager: the module of PAGER_SOURCES; arch: compute capability, 90 for 9.0."""

    format: str
    module: Module
    pager: Module
    arch: int
    multiprocessors: int
    activations: PrefillActivations = "bf16"
    """Of the large GEMMs; with "mxfp8" the module has scaled.sources()."""

    def size_of(self, tokens: int, experts: int, top_k: int, scan: bool) -> Size:
        """Of a batch, whose layer has so many experts."""
        if not self.mixes:   # a decoding step is small, whatever it is: its graph holds the launches that may fetch
            return "large" if scan and tokens * top_k >= LARGE * experts else "small"
        return "small" if tokens <= COMBINED_TOKENS else "mixed" if tokens <= MIXED_TOKENS else "large"

    def most_small(self, tokens: int, decode_tokens: int, experts: int, top_k: int) -> int:
        """Tokens of the largest batch that the small kernels have a part in, of at most `tokens`, or of `decode_tokens` where it decodes."""
        return min(tokens, MIXED_TOKENS if self.mixes else max(decode_tokens, (LARGE * experts - 1) // top_k))

    @property
    def mixes(self) -> bool:
        """Whether a batch's experts can be parted: MXFP8 activations of the large kernels lie where the small ones have their planes."""
        return self.large is not SCALED

    def begin(self, args: MlpArgs, size: Size, stream: int) -> None:
        """The plan, and what the GEMMs of `size` read of x."""
        if size != "large":
            args.late = 1 + -(-args.layer.tokens // QUANTIZED)
            self.pager.launch("begin", args.late, RESOLVE_THREADS, args, stream=stream, early=True)
        else:
            self.pager.launch("resolve", 1, RESOLVE_THREADS, args.layer, stream=stream)
        self._prepare(args, size, stream)

    def quantize(self, args: MlpArgs, size: Size, stream: int) -> None:
        """The second half of `begin`, where the plan comes from elsewhere."""
        if size != "large":
            self.pager.launch("quantize", -(-args.layer.tokens // QUANTIZED), RESOLVE_THREADS, args, stream=stream)
        self._prepare(args, size, stream)

    def _prepare(self, args: MlpArgs, size: Size, stream: int) -> None:
        if size != "small" and self.large.prepare:
            units = args.layer.tokens * (padded(args.hidden) // 8)
            self.module.launch(self.large.prepare, -(-units // PREPARE_THREADS), PREPARE_THREADS, args, stream=stream)

    def gemms(self, args: MlpArgs, size: Size, waves: int, stream: int, early: bool = False) -> None:
        """`waves` waves from args.wave on, and the sum over places if the last of them is the plan's last (`combines`). early: right behind `begin` or `quantize`."""
        args.many, args.beside = PAIRS[size], size == "mixed"
        for wave in range(args.wave, args.wave + waves):
            args.wave = wave
            if size != "small":
                self._large("gate_up", args, stream)
            if size != "large":   # beside gate_up_large: on the multiprocessors where that has nothing left
                self._small(args, stream, early or size == "mixed")
                early, args.late = False, 0
            if size != "small":
                self._large("down", args, stream)

    def _small(self, args: MlpArgs, stream: int, early: bool) -> None:
        kernel = SmallKernel(self.format, self.arch)
        pairs, strips = args.layer.tokens * args.layer.top_k, -(-args.hidden // 64)
        blocks = min(self.multiprocessors, -(-pairs * (args.tiles + strips) // kernel.groups) + args.fetchers)
        self.module.launch("mlp_small", blocks, kernel.threads, args, kernel.shared_bytes, stream, early)

    def _large(self, which: Literal["gate_up", "down"], args: MlpArgs, stream: int) -> None:
        pairs, kernel = args.layer.tokens * args.layer.top_k, self.large
        fetchers, strips = (args.fetchers, args.tiles) if which == "gate_up" else (0, -(-args.hidden // 64))
        most = kernel.blocks * max(1, self.multiprocessors - (0 if args.fetchers else SPARED))   # its own blocks fetch, or others do beside it
        blocks = min(most, pairs * -(-strips // kernel.strips) + fetchers)
        self.module.launch(f"{which}_{kernel.name}", blocks, kernel.threads, args, kernel.shared_bytes, stream)

    @property
    def large(self) -> "LargeKernel":
        if is_scaled(self.format, self.activations):
            return SCALED
        return HOPPER if self.arch == 90 else MMA

    def combine(self, args: MlpArgs, stream: int) -> None:
        """The sum over places, for GEMMs that did not `combine`."""
        per_row = -(-(args.hidden // 8) // COMBINE_THREADS)
        self.module.launch("combine", args.layer.tokens * per_row, COMBINE_THREADS, args, stream=stream)


@dataclass(frozen=True)
class LargeKernel:
    """Of large.cuh or scaled.cuh, gate_up_{name} and down_{name}. blocks: of a multiprocessor; strips: of a block."""

    name: str
    threads: int
    blocks: int
    strips: int
    shared_bytes: int
    prepare: str = ""
    """The kernel that makes of x what the GEMMs read, a thread for 8 columns: in another order (columns.cuh), or in MXFP8."""


MMA = LargeKernel("large", 128, 2, 4, 0, "arrange")
HOPPER = LargeKernel("large", 640, 1, 4, 223 << 10, "arrange")   # kRingBytes of large_hopper.cuh, a table, and what aligns them
SCALED = LargeKernel("scaled", 128, 2, 4, 0, "quantize_x")
