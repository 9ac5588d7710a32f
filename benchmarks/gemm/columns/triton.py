"""vLLM's Triton fused_experts: FP8 weights in blocks of 128 x 128 with FP8 activations in groups of 128, and BF16."""

import torch

from gemm import reference, rowfill
from gemm.columns.vllm import activation_of, split
from gemm.reference import Matrices
from gemm.shapes import Shape

BLOCK = 128


def random_weights(experts: int, rows: int, columns: int, format: str, device: torch.device, seed: int) -> torch.Tensor:
    """[experts, rows, columns], E4M3 below 2, or BF16."""
    generator = torch.Generator(device).manual_seed(seed)
    if format == "bf16":
        return torch.empty((experts, rows, columns), dtype=torch.bfloat16, device=device).normal_(0, rowfill.DEVIATION, generator=generator)
    codes = torch.empty((experts, rows, columns), dtype=torch.uint8, device=device)
    rowfill.random_bytes(codes, generator)
    codes &= 0xBF
    return codes.view(torch.float8_e4m3fn)


class TritonExperts:
    """See Column. One layer of weights: its experts are larger than an L2 cache, few of them together. Activations in FP8 have 4 significant bits."""

    copies, compiles = 1, True

    def __init__(self, shape: Shape, format: str, device: torch.device) -> None:
        from vllm.model_executor.layers.fused_moe.config import (
            FUSED_MOE_UNQUANTIZED_CONFIG,
            fp8_w8a8_moe_quant_config,
        )

        if shape.biased:
            raise NotImplementedError("this column has no biases")
        e, h, f = shape.experts, shape.hidden, shape.inter
        self.shape, self.tolerance = shape, 8e-2 if format == "fp8" else 1e-2
        self.w = [random_weights(e, 2 * f, h, format, device, 1), random_weights(e, h, f, format, device, 2)]
        self.scales: list[torch.Tensor] | None = None
        self.config = FUSED_MOE_UNQUANTIZED_CONFIG
        self.expert_bytes = 2.0 * shape.weights
        if format == "fp8":
            count = lambda n: -(-n // BLOCK)
            self.scales = [rowfill.FLOAT_SCALE * (torch.rand((e, count(n), count(k)), device=device) + 0.5) for n, k in ((2 * f, h), (h, f))]
            self.config = fp8_w8a8_moe_quant_config(w1_scale=self.scales[0], w2_scale=self.scales[1], block_shape=[BLOCK, BLOCK])
            self.expert_bytes = shape.weights * (1 + 4 / BLOCK**2)
        self.notes = {"configuration": "vLLM's file for the GPU and sizes if it has one, else its default"}

    def __call__(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        return fused_experts(x, *self.w, weights, ids, activation=activation_of(self.shape), quant_config=self.config)

    def _expert(self, e: int) -> Matrices:
        values = [w[e].float() for w in self.w]
        if self.scales:
            wide = lambda s: s.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            values = [v * wide(s[e])[: v.shape[0], : v.shape[1]] for v, s in zip(values, self.scales, strict=True)]
        return split(self.shape, *values)

    def reference(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return reference.layer(self._expert, self.shape.activation, x, weights, ids)

    def close(self) -> None:
        self.w, self.scales = [], None


def make(shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> TritonExperts:
    return TritonExperts(shape, format, device)
