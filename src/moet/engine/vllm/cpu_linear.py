"""FP8 block-scaled linears on CPUs without AMX, for which vLLM 0.32 has no kernel: weights are dequantized once, activations stay as they are.

It is the last in vLLM's own list, so a CPU with AMX gets vLLM's kernels. Checkpoints of DeepSeek-V3, Kimi-K2 or Qwen3 in FP8 have such linears
around their experts. The dense part then takes 2 (bfloat16) or 4 (float32) bytes a weight instead of 1.
"""

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.fp8_utils import _upcast_e8m0_to_fp32
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """weight E4M3 [N, K], scale [ceil(N / block[0]), ceil(K / block[1])] -> [N, K]; the product is made in float32."""
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        scale = _upcast_e8m0_to_fp32(scale)
    n, k = weight.shape
    rows = scale.float().repeat_interleave(block[0], 0)[:n]
    return (weight.float() * rows.repeat_interleave(block[1], 1)[:, :k]).to(dtype)


class DequantizedFp8BlockLinear(Fp8BlockScaledMMLinearKernel):
    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "requires a CPU")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not getattr(layer, "_cpu_skip_gemm_dispatch", False):  # latent attention's kv_b_proj: vLLM dequantizes it for itself later
            params = self._get_layer_params(layer)
            new = dequantized(params.weight, params.block_scale, self.weight_group_shape, self.config.out_dtype)
            replace_parameter(layer, params.WEIGHT, new)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: object) -> torch.Tensor:
        weight = layer.weight
        if weight.dtype == torch.float8_e4m3fn:
            weight = dequantized(weight, self._get_layer_params(layer).block_scale, self.weight_group_shape, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("apply_weights does it all")


def register() -> None:
    kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.CPU, [])
    if DequantizedFp8BlockLinear not in kernels:
        kernels.append(DequantizedFp8BlockLinear)
