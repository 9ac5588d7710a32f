"""vLLM's Marlin: 4-bit weights, bf16 activations. Weights are prepared by vLLM's own functions, the call is its MarlinExperts.apply's.

MXFP4 sizes are rounded up as vLLM does it for gpt-oss (hidden to 256, intermediate to 128), states with them.
"""

from types import SimpleNamespace

import torch

from gemm import reference
from gemm.columns import fp4
from gemm.columns.vllm import activation_of, split
from gemm.reference import Matrices
from gemm.shapes import Shape

GLOBAL_SCALE = 2.0**-8
"""nvfp4: of a matrix, beside block scales of 1 to 1.875."""
GROUP = {"mxfp4": 32, "nvfp4": 16}
SCALE_BYTES = {"mxfp4": (118, 2), "nvfp4": (0x38, 8)}


class Marlin:
    """See Column. Both copies hold the same numbers at different addresses."""

    copies, compiles, tolerance = 2, False, 1e-2

    def __init__(self, shape: Shape, format: str, device: torch.device) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils import (
            MARLIN_MAX_BLOCKS_PER_SM,
            marlin_make_workspace_new,
        )

        self.shape, self.format, self.group = shape, format, GROUP[format]
        up = lambda n, to: -(-n // to) * to if format == "mxfp4" else n
        e, self.hidden, self.inter = shape.experts, up(shape.hidden, 256), up(shape.inter, 128)
        self.source = [fp4.nibbles(e, 2 * self.inter, self.hidden, device, 1), fp4.nibbles(e, self.hidden, self.inter, device, 2)]
        self.source[0][:, 2 * shape.inter :] = 0
        self.source[0][:, :, shape.hidden // 2 :] = 0
        self.source[1][:, :, shape.inter // 2 :] = 0
        low, span = SCALE_BYTES[format]
        self.scales = [fp4.scale_bytes(*w.shape[:2], 2 * w.shape[2] // self.group, low, span, device, seed) for seed, w in enumerate(self.source)]
        self.biases: list[torch.Tensor | None] = [None, None]
        if shape.biased:
            self.biases = [0.1 * torch.randn(w.shape[:2], device=device) for w in self.source]
            self.biases[0][:, 2 * shape.inter :] = 0
        first, self.globals = self._prepare(device)
        self.tensors = [first, tuple(None if t is None else t.clone() for t in first)]
        self.workspace = marlin_make_workspace_new(device, MARLIN_MAX_BLOCKS_PER_SM)   # vLLM keeps one too
        self.expert_bytes = shape.weights * (0.5 + 1 / self.group)
        self.notes = {"weights": "prepared by vLLM from random FP4 codes", "activation": str(activation_of(shape)), "sizes": [self.hidden, self.inter]}

    def _prepare(self, device: torch.device) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, torch.Tensor | None]]:
        """w1, w2, their biases, their scales; and the scales of whole matrices (nvfp4)."""
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as prepare

        layer = SimpleNamespace(params_dtype=torch.bfloat16, num_experts=self.shape.experts, hidden_size=self.hidden, intermediate_size_per_partition=self.inter)
        if self.format == "mxfp4":
            w1, w2, s1, s2, b1, b2 = prepare.prepare_moe_mxfp4_layer_for_marlin(layer, *self.source, *self.scales, *self.biases)
            return (w1, w2, b1, b2, s1, s2), (None, None)
        if self.shape.biased:
            raise NotImplementedError("vLLM prepares no biases for Marlin NVFP4")
        one = torch.full((self.shape.experts,), GLOBAL_SCALE, device=device)
        e4m3 = [s.view(torch.float8_e4m3fn) for s in self.scales]
        w1, s1, g1, w2, s2, g2 = prepare.prepare_nvfp4_moe_layer_for_marlin(layer, self.source[0], e4m3[0], one, self.source[1], e4m3[1], one, is_act_and_mul=True)
        return (w1, w2, None, None, s1, s2), (g1, g2)

    def __call__(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        if self.hidden != self.shape.hidden:
            x = torch.nn.functional.pad(x, (0, self.hidden - self.shape.hidden))
        out = torch.empty_like(x)
        fused_marlin_moe(
            x, *self.tensors[copy], topk_weights=weights, topk_ids=ids, quant_type_id=scalar_types.float4_e2m1f.id, global_num_experts=self.shape.experts,
            activation=activation_of(self.shape), global_scale1=self.globals[0], global_scale2=self.globals[1], workspace=self.workspace, output=out,
            moe_sum=lambda pairs, output, topk_ids, expert_map: ops.moe_sum(pairs, output),
        )  # fmt: skip
        return out[:, : self.shape.hidden]

    def _expert(self, e: int) -> Matrices:
        scales = [s[e] for s in self.scales]
        floats = [torch.exp2(s.float() - 127) if self.format == "mxfp4" else s.view(torch.float8_e4m3fn).float() * GLOBAL_SCALE for s in scales]
        w13, w2 = (fp4.values(w[e], s) for w, s in zip(self.source, floats, strict=True))
        h, f = self.shape.hidden, self.shape.inter
        b13, b2 = (None if b is None else b[e].bfloat16().float()[:n] for b, n in zip(self.biases, (2 * f, h), strict=True))
        return split(self.shape, w13[: 2 * f, :h], w2[:h, :f], b13, b2)

    def reference(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return reference.layer(self._expert, self.shape.activation, x, weights, ids)

    def close(self) -> None:
        self.tensors, self.source, self.scales = [], [], []


def make(shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> Marlin:
    return Marlin(shape, format, device)
