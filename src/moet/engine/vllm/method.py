"""vLLM's method object of one routed-experts layer: no parameters, and a forward that asks the worker's shared experts."""

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.utils.torch_utils import direct_register_custom_op

from moet.engine.vllm import experts
from moet.engine.vllm.run import Run
from moet.errors import EngineError


class MoetExpertsMethod(FusedMoEMethodBase):
    """moe_kernel stays None: vLLM's runner routes, runs the shared experts, and all-reduces the sum that `apply` returns."""

    requires_device_loading = False

    def __init__(self, layer: Any, prefix: str, config: Any, run: Run) -> None:
        super().__init__(layer.moe_config)
        self.experts = experts.of(run, config)
        self.layer = self.experts.layer_index(prefix)
        self.experts.check_layer(self.layer, layer, prefix)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers nothing: the experts' bytes live in the pack and the arena."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, hidden] float32 or bfloat16 (on a GPU bfloat16), topk_weights and topk_ids [T, k] -> this rank's part of the routed sum, [T, hidden]."""
        if torch.compiler.is_compiling():
            return torch.ops.moet.routed_experts(x, topk_weights, topk_ids, layer.layer_name)
        return self.experts.forward(self.layer, x, topk_weights, topk_ids)


def routed_experts(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    # On CPUs vLLM's compiled graph goes through the MoE layer into apply(); as one opaque op it needs neither tracing nor guards. (On GPUs the layer is
    # vLLM's own opaque op, so apply() is never compiled.)
    method = get_forward_context().no_compile_layers[layer_name].routed_experts.quant_method
    if not isinstance(method, MoetExpertsMethod):
        raise EngineError(f"{layer_name}: expected moet's method, found {type(method).__name__}")
    return method.experts.forward(method.layer, x, topk_weights, topk_ids)


def routed_experts_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)


library = torch.library.Library("moet", "FRAGMENT")  # alive as long as the op is
direct_register_custom_op("routed_experts", routed_experts, fake_impl=routed_experts_fake, target_lib=library)
