"""vLLM's Humming (the package humming-kernels, compiled at first use): uint2 or MXFP4 weights, bf16 activations. vLLM 0.33 prefers it to Marlin on Hopper.

The call is vLLM's HummingIndexedExperts.apply, its choice without expert parallelism; uint2 has a bf16 scale for each 64 columns: 2.25 bits a weight, as ours.
"""

import json
import os
import shutil
from types import SimpleNamespace

import torch

from gemm import reference
from gemm.columns import fp4
from gemm.columns.vllm import activation_of, split
from gemm.reference import Matrices
from gemm.shapes import Shape

GROUP = {"uint2": 64, "mxfp4": 32}
SCALE = 0.012
"""uint2: of a group, times 0.5 to 1.5; its codes mean -2, -1, 0, 1."""


class Humming:
    """See Column. Both copies hold the same numbers at different addresses. tokens: batches that kernels are compiled for."""

    copies, compiles, tolerance = 2, True, 1e-2

    def __init__(self, shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> None:
        if shape.biased:
            raise NotImplementedError("this column has no biases")
        if shutil.which("nvcc"):
            os.environ.setdefault("HUMMING_COMPILER", "nvcc")   # NVRTC needs nvrtc.h, which toolkits may lack
        self.shape, self.format = shape, format
        e, h, f, bits = shape.experts, shape.hidden, shape.inter, 2 if format == "uint2" else 4
        self.codes = [fp4.nibbles(e, n, k * bits // 4, device, seed) for seed, (n, k) in enumerate(((2 * f, h), (h, f)))]
        self.scales = [self._scales(n, k, device, seed) for seed, (n, k) in enumerate(((2 * f, h), (h, f)))]
        self.experts = self._prepare(device, tokens)
        self.expert_bytes = shape.weights * (bits / 8 + (1 / 32 if format == "mxfp4" else 2 / 64))
        self.notes = {"compiler": os.environ.get("HUMMING_COMPILER", "nvrtc"), "tiles": self.tiles}

    def _scales(self, n: int, k: int, device: torch.device, seed: int) -> torch.Tensor:
        groups = k // GROUP[self.format]
        if self.format == "mxfp4":
            return fp4.scale_bytes(self.shape.experts, n, groups, 118, 2, device, seed)
        generator = torch.Generator(device).manual_seed(seed)
        return (SCALE * (torch.rand((self.shape.experts, n, groups), device=device, generator=generator) + 0.5)).bfloat16()

    def _prepare(self, device: torch.device, tokens: tuple[int, ...]) -> list:
        """vLLM's experts object of each copy, with its tables of kernels cut down to the batches that are timed."""
        from vllm.model_executor.layers.fused_moe.experts.fused_humming_moe import HummingIndexedExperts
        from vllm.model_executor.layers.quantization.utils.humming.moe import make_humming_moe_quant_config
        from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
        from vllm.utils.humming import (
            HummingInputSchema,
            HummingWeightSchema,
            prepare_and_transform_humming_tensors,
        )

        class Experts(HummingIndexedExperts):
            def get_global_valid_shape_m(self, topk_ids: torch.Tensor) -> int:
                return topk_ids.numel()   # without data parallelism, as vLLM's own, which asks a forward context

        shape, group = self.shape, GROUP[self.format]
        e8m0 = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0"} if self.format == "mxfp4" else {"b_dtype": "uint2"}
        schema = HummingWeightSchema(**e8m0, weight_scale_group_size=group)
        configs, tensors = {}, {}
        for i, (name, n, k) in enumerate((("w13", 2 * shape.inter, shape.hidden), ("w2", shape.hidden, shape.inter))):
            scale = self.scales[i].view(torch.float8_e8m0fnu) if self.format == "mxfp4" else self.scales[i]
            configs[name], tensors[name] = prepare_and_transform_humming_tensors(
                tensors={"weight": self.codes[i].view(torch.int32), "weight_scale": scale}, shape_n=n, shape_k=k, pad_n_to_multiple=256, pad_k_to_multiple=128,
                input_schema=HummingInputSchema(), weight_schema=schema, num_experts=shape.experts, torch_dtype=torch.bfloat16, device=device,
            )  # fmt: skip
        moe = SimpleNamespace(
            device=device, in_dtype=torch.bfloat16, num_local_experts=shape.experts, num_experts=shape.experts, experts_per_token=shape.top_k, swiglu_limit=None,
            swiglu_alpha=None, swiglu_beta=None, activation_situ_beta=None, activation_situ_linear_beta=None,
        )  # fmt: skip
        made = []
        for copy in range(self.copies):
            own = {name: {k: v.clone() if copy else v for k, v in t.items()} for name, t in tensors.items()}
            quant = make_humming_moe_quant_config(
                quant_dtype=None, weight_dtype=str(schema.b_dtype), weight_group_shape=GroupShape(row=group, col=1), w1_scale=own["w13"]["weight_scale"],
                w2_scale=own["w2"]["weight_scale"], w1_gscale=own["w13"].get("weight_scale_2"), w2_gscale=own["w2"].get("weight_scale_2"), humming_configs=configs,
            )  # fmt: skip
            experts = Experts(moe_config=moe, quant_config=quant)
            self.tiles = keep_used(experts, [t * shape.top_k for t in tokens])
            made.append((experts, own["w13"]["weight"], own["w2"]["weight"]))
        return made

    def __call__(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        experts, w1, w2 = self.experts[copy]
        activation = activation_of(self.shape)
        first, second, _ = experts._workspace_shapes(len(x), self.shape.top_k, activation)
        spaces = [torch.empty(s, dtype=torch.bfloat16, device=x.device) for s in (first, second)]
        out = torch.empty_like(x)
        experts.apply(
            output=out, hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation=activation, global_num_experts=self.shape.experts,
            expert_map=None, a1q_scale=None, a2_scale=None, workspace13=spaces[0], workspace2=spaces[1], expert_tokens_meta=None, apply_router_weight_on_input=False,
        )  # fmt: skip
        return out

    def _expert(self, e: int) -> Matrices:
        out = []
        for codes, scales in zip(self.codes, self.scales, strict=True):
            if self.format == "mxfp4":
                out.append(fp4.values(codes[e], torch.exp2(scales[e].float() - 127)))
                continue
            fields = torch.stack([codes[e] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1).float() - 2
            out.append(fields * scales[e].float().repeat_interleave(GROUP["uint2"], 1))
        return split(self.shape, *out)

    def reference(self, copy: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return reference.layer(self._expert, self.shape.activation, x, weights, ids)

    def close(self) -> None:
        self.experts, self.codes, self.scales = [], [], []


def keep_used(experts: object, pairs: list[int]) -> dict[str, list]:
    """Leaves those rows of an object's tables (from, to, configuration) that a number of pairs falls into, since the first call compiles all; returns their tiles."""
    tiles = {}
    for name in ("w13", "w2"):
        used = [row for row in getattr(experts, f"{name}_tuning_config") if any(row[0] < n <= row[1] for n in pairs)]
        setattr(experts, f"{name}_tuning_config", used)
        setattr(experts, f"{name}_tuning_config_str", json.dumps(used))
        tiles[name] = [[row[0], row[1], list(row[2]["block_shape"]), row[2].get("mma_type")] for row in used]
    return tiles


def make(shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> Humming:
    return Humming(shape, format, device, tokens)
