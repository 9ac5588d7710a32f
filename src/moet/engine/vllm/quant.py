"""Quantization configs: each one of the checkpoint's own classes, with the routed experts taken out.

Registered under the same names, so that vLLM's detection and all that is not a routed expert stay as they are. The classes are module level:
vLLM pickles its config, quantization config included, to processes that have not loaded plugins yet.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptMixedPrecisionConfig, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.models.deepseek_v4 import DeepseekV4FP8Config

from moet.engine.vllm import run as runs
from moet.engine.vllm.method import MoetExpertsMethod


def experts_method(layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
    """moet's method for a routed-experts layer of a model that moet serves; None for everything else."""
    if isinstance(layer, RoutedExperts):
        config = get_current_vllm_config()
        run = runs.of(config)
        if run is not None:
            return MoetExpertsMethod(layer, prefix, config, run)
    return None


class ExpertsTaken(QuantizationConfig):
    """Mixed in before a stock config class."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return experts_method(layer, prefix) or super().get_quant_method(layer, prefix)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:  # a classmethod in some of the stock classes: callable on an instance either way
        stock = super().get_supported_act_dtypes()
        return [*stock, *(d for d in (torch.float32, torch.bfloat16) if d not in stock)]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        # Packs say {"moet": {"format": 1}} in there; compressed-tensors refuses keys that it does not know.
        return super().from_config({k: v for k, v in config.items() if k != "moet"})


class MoetFp8Config(ExpertsTaken, Fp8Config): ...


class MoetDeepseekV4FP8Config(ExpertsTaken, DeepseekV4FP8Config): ...


class MoetModelOptFp8Config(ExpertsTaken, ModelOptFp8Config): ...


class MoetModelOptNvFp4Config(ExpertsTaken, ModelOptNvFp4Config): ...


class MoetModelOptMixedPrecisionConfig(ExpertsTaken, ModelOptMixedPrecisionConfig): ...


class MoetCompressedTensorsConfig(ExpertsTaken, CompressedTensorsConfig): ...


class MoetMxfp4Config(ExpertsTaken, Mxfp4Config): ...


class MoetGptOssMxfp4Config(ExpertsTaken, GptOssMxfp4Config): ...


class MoetQuantConfig(QuantizationConfig):
    """A checkpoint without quantization of its own: all but the routed experts is unquantized."""

    def get_name(self) -> str:
        return "moet"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]  # float16 is refused with a way out, in moet.engine.vllm.refuse

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MoetQuantConfig":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return experts_method(layer, prefix)


CLASSES: dict[str, type[QuantizationConfig]] = {
    "fp8": MoetFp8Config,
    "deepseek_v4_fp8": MoetDeepseekV4FP8Config,
    "modelopt": MoetModelOptFp8Config,
    "modelopt_fp4": MoetModelOptNvFp4Config,
    "modelopt_mixed": MoetModelOptMixedPrecisionConfig,
    "compressed-tensors": MoetCompressedTensorsConfig,
    "mxfp4": MoetMxfp4Config,
    "gpt_oss_mxfp4": MoetGptOssMxfp4Config,
    "moet": MoetQuantConfig,
}


def register() -> None:
    for name, cls in CLASSES.items():
        register_quantization_config(name)(cls)
