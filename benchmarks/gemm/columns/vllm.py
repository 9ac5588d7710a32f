"""What the columns of vLLM share: its platform must be CUDA, and its own functions are called as its layers call them."""

import torch

from gemm.reference import Matrices
from gemm.shapes import Shape


def activation_of(shape: Shape) -> object:
    """vLLM's name for the shape's activation. Its silu is timed without the clamp of V4-Flash (a limit that random states do not reach)."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return MoEActivation.SWIGLUOAI if shape.activation.kind == "swiglu_oai" else MoEActivation.SILU


def split(shape: Shape, w13: torch.Tensor, w2: torch.Tensor, bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None) -> Matrices:
    """Of one expert's float32 w13 [2 inter, hidden]: gate above up, or one after the other in turn (swigluoai)."""
    oai = shape.activation.kind == "swiglu_oai"
    halves = (lambda t: (t[0::2], t[1::2])) if oai else (lambda t: (t[: shape.inter], t[shape.inter :]))
    gate, up = halves(w13)
    biases = (None, None) if bias13 is None else halves(bias13)
    return gate, up, w2, *biases, bias2
