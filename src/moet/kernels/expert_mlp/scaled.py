"""The GEMMs of a prefill with MXFP8 activations (scaled.cuh), and where they can be used."""

from moet.kernels.expert_mlp.cuda import MlpArgs
from moet.kernels.gpu.module import Module

SCALED_SOURCES = ("expert_mlp/scaled.cuh",)
SCALED_FORMATS = ("sym2", "tcq2", "mxfp4", "fp8", "fp8_row")
"""Row formats whose levels are E4M3 numbers with one scale for 32 columns; nvfp4 and bf16 rows keep bf16 activations."""
SCALED_CAPABILITY = (8, 9)
"""The oldest GPUs that have E4M3. Block scales in the tensor cores are sm_120a's; others emulate them, and are slower than with bf16."""
SCALED_THREADS, QUANTIZE_THREADS = 128, 256
SCALED_STRIPS = 4   # of a block


def mxfp8_row_bytes(columns: int) -> int:
    """Of a row's codes, whole stages of 128 columns, and its scales."""
    return -(-columns // 128) * 132


def quantize(module: Module, args: MlpArgs, multiprocessors: int, stream: int) -> None:
    """Queues x's MXFP8 of all tokens, before a layer's first wave."""
    groups = args.layer.tokens * mxfp8_row_bytes(args.hidden) // 33 * 8   # threads, eight a block of 32 columns
    module.launch("quantize_x", min(-(-groups // QUANTIZE_THREADS), 8 * multiprocessors), QUANTIZE_THREADS, args, stream=stream)


def gemms(module: Module, args: MlpArgs, most: int, stream: int) -> None:
    """Queues both GEMMs of the wave that args names, in at most `most` blocks."""
    pairs = args.layer.tokens * args.layer.top_k
    strips = -(-args.tiles // SCALED_STRIPS), -(-args.hidden // (64 * SCALED_STRIPS))
    module.launch("gate_up_scaled", min(most, pairs * strips[0] + args.fetchers), SCALED_THREADS, args, stream=stream)
    module.launch("down_scaled", min(most, pairs * strips[1]), SCALED_THREADS, args, stream=stream)
