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


def schema_of(format: str) -> object:
    """HummingWeightSchema."""
    from vllm.utils.humming import HummingWeightSchema

    e8m0 = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0"} if format == "mxfp4" else {"b_dtype": "uint2"}
    return HummingWeightSchema(**e8m0, weight_scale_group_size=GROUP[format])


def sublayers(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and columns of each matrix."""
    return {"w13": (2 * shape.inter, shape.hidden), "w2": (shape.hidden, shape.inter)}


PADDING = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}
"""As vLLM asks for."""


def experts_of(shape: Shape, format: str, configs: dict, tensors: dict[str, dict[str, torch.Tensor]], device: torch.device, tokens: tuple[int, ...]) -> object:
    """vLLM's experts object over prepared weights, its tables of kernels cut down to the batches that are timed. tensors: of each sublayer; none to compile only."""
    from vllm.model_executor.layers.fused_moe.experts.fused_humming_moe import HummingIndexedExperts
    from vllm.model_executor.layers.quantization.utils.humming.moe import make_humming_moe_quant_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    class Experts(HummingIndexedExperts):
        def get_global_valid_shape_m(self, topk_ids: torch.Tensor) -> int:
            return topk_ids.numel()   # without data parallelism, as vLLM's own, which asks a forward context

    moe = SimpleNamespace(
        device=device, in_dtype=torch.bfloat16, num_local_experts=shape.experts, num_experts=shape.experts, experts_per_token=shape.top_k, swiglu_limit=None,
        swiglu_alpha=None, swiglu_beta=None, activation_situ_beta=None, activation_situ_linear_beta=None,
    )  # fmt: skip
    first, second = (tensors.get(name, {}) for name in ("w13", "w2"))
    quant = make_humming_moe_quant_config(
        quant_dtype=None, weight_dtype=str(schema_of(format).b_dtype), weight_group_shape=GroupShape(row=GROUP[format], col=1), w1_scale=first.get("weight_scale"),
        w2_scale=second.get("weight_scale"), w1_gscale=first.get("weight_scale_2"), w2_gscale=second.get("weight_scale_2"), humming_configs=configs,
    )  # fmt: skip
    experts = Experts(moe_config=moe, quant_config=quant)
    pairs = [1, *(t * shape.top_k for t in tokens)]   # the launcher looks at the row of 1 as well
    for name in ("w13", "w2"):   # the first call would compile all 30 kernels of a table
        used = [row for row in getattr(experts, f"{name}_tuning_config") if any(row[0] < n <= row[1] for n in pairs)]
        setattr(experts, f"{name}_tuning_config", used)
        setattr(experts, f"{name}_tuning_config_str", json.dumps(used))
    return experts


def compile_ahead(shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> None:
    """Compiles the GEMMs of a column into Humming's cache on disk."""
    from humming.kernel.humming import HummingKernel
    from humming.transform import prepare_layer_config
    from vllm.utils.humming import HummingInputSchema

    configs = {
        name: prepare_layer_config(
            n, k, schema_of(format), HummingInputSchema(), num_experts=shape.experts, torch_dtype=torch.bfloat16, device=device, **PADDING
        )
        for name, (n, k) in sublayers(shape).items()
    }  # fmt: skip
    experts = experts_of(shape, format, configs, {}, device, tokens)
    for name, config in configs.items():
        HummingKernel.prepare_kernels(config.to_str(), experts.compute_config_str, getattr(experts, f"{name}_tuning_config_str"), device)


def choose_compiler() -> None:
    """NVRTC needs nvrtc.h, which toolkits may lack."""
    if shutil.which("nvcc"):
        os.environ.setdefault("HUMMING_COMPILER", "nvcc")


class Humming:
    """See Column. Both copies hold the same numbers at different addresses. tokens: batches that kernels are compiled for."""

    copies, compiles, tolerance = 2, True, 1e-2

    def __init__(self, shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> None:
        if shape.biased:
            raise NotImplementedError("this column has no biases")
        choose_compiler()
        self.shape, self.format = shape, format
        e, h, f, bits = shape.experts, shape.hidden, shape.inter, 2 if format == "uint2" else 4
        self.codes = [fp4.nibbles(e, n, k * bits // 4, device, seed) for seed, (n, k) in enumerate(((2 * f, h), (h, f)))]
        self.scales = [self._scales(n, k, device, seed) for seed, (n, k) in enumerate(((2 * f, h), (h, f)))]
        self.experts = self._prepare(device, tokens)
        self.expert_bytes = shape.weights * (bits / 8 + (1 / 32 if format == "mxfp4" else 2 / 64))
        experts = self.experts[0][0]
        tiles = {n: [[*row[:2], list(row[2]["block_shape"]), row[2].get("mma_type")] for row in getattr(experts, f"{n}_tuning_config")] for n in ("w13", "w2")}
        self.notes = {"compiler": os.environ.get("HUMMING_COMPILER", "nvrtc"), "tiles": tiles}

    def _scales(self, n: int, k: int, device: torch.device, seed: int) -> torch.Tensor:
        groups = k // GROUP[self.format]
        if self.format == "mxfp4":
            return fp4.scale_bytes(self.shape.experts, n, groups, 118, 2, device, seed)
        generator = torch.Generator(device).manual_seed(seed)
        return (SCALE * (torch.rand((self.shape.experts, n, groups), device=device, generator=generator) + 0.5)).bfloat16()

    def _prepare(self, device: torch.device, tokens: tuple[int, ...]) -> list[tuple[object, torch.Tensor, torch.Tensor]]:
        """Of each copy: vLLM's experts object, w13 and w2."""
        from vllm.utils.humming import HummingInputSchema, prepare_and_transform_humming_tensors

        configs, tensors = {}, {}
        for (name, (n, k)), codes, scales in zip(sublayers(self.shape).items(), self.codes, self.scales, strict=True):
            scales = scales.view(torch.float8_e8m0fnu) if self.format == "mxfp4" else scales
            configs[name], tensors[name] = prepare_and_transform_humming_tensors(
                tensors={"weight": codes.view(torch.int32), "weight_scale": scales}, shape_n=n, shape_k=k, input_schema=HummingInputSchema(),
                weight_schema=schema_of(self.format), num_experts=self.shape.experts, torch_dtype=torch.bfloat16, device=device, **PADDING,
            )  # fmt: skip
        made = []
        for copy in range(self.copies):
            own = {name: {k: v.clone() if copy else v for k, v in t.items()} for name, t in tensors.items()}
            made.append((experts_of(self.shape, self.format, configs, own, device, tokens), own["w13"]["weight"], own["w2"]["weight"]))
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


def make(shape: Shape, format: str, device: torch.device, tokens: tuple[int, ...]) -> Humming:
    return Humming(shape, format, device, tokens)
