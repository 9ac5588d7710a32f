"""The columns: each module has `make(shape, format, device, tokens)`, which may raise whatever keeps it from running there; the table keeps the reason."""

from dataclasses import dataclass
from importlib import import_module

import torch

from gemm.column import Column
from gemm.shapes import Shape


@dataclass(frozen=True)
class Kind:
    """module: in this folder. format: of the weights. ours: this project's. What it is compared as: two_bit, fp4, fp8, bf16."""

    name: str
    module: str
    format: str
    group: str
    title: str
    ours: bool = False

    def make(self, shape: Shape, device: torch.device, tokens: tuple[int, ...]) -> Column:
        return import_module(f"gemm.columns.{self.module}").make(shape, self.format, device, tokens)


KINDS = {
    k.name: k
    for k in (
        Kind("tcq2", "ours", "tcq2", "two_bit", "ours, tcq2", ours=True),
        Kind("sym2", "ours", "sym2", "two_bit", "ours, sym2", ours=True),
        Kind("mxfp4", "ours", "mxfp4", "fp4", "ours, mxfp4", ours=True),
        Kind("nvfp4", "ours", "nvfp4", "fp4", "ours, nvfp4", ours=True),
        Kind("fp8", "ours", "fp8", "fp8", "ours, fp8", ours=True),
        Kind("bf16", "ours", "bf16", "bf16", "ours, bf16", ours=True),
        Kind("marlin_mxfp4", "marlin", "mxfp4", "fp4", "vLLM Marlin MXFP4"),
        Kind("marlin_nvfp4", "marlin", "nvfp4", "fp4", "vLLM Marlin NVFP4"),
        Kind("humming_mxfp4", "humming", "mxfp4", "fp4", "vLLM Humming MXFP4"),
        Kind("humming_uint2", "humming", "uint2", "two_bit", "vLLM Humming uint2"),
        Kind("triton_fp8", "triton", "fp8", "fp8", "vLLM Triton FP8 (128 x 128)"),
        Kind("triton_bf16", "triton", "bf16", "bf16", "vLLM Triton BF16"),
    )
}
SHORT = ("tcq2", "mxfp4", "marlin_mxfp4")
"""Of a shape that is not timed in full: ours and one of the others."""
UNIFORM = (*SHORT, "triton_fp8")


def columns_of(shape: Shape) -> list[Kind]:
    chosen = UNIFORM if shape.routing == "uniform" else SHORT
    return [k for k in KINDS.values() if shape.full or k.name in chosen]
