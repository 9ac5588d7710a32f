"""The rows of the table of architectures: which checkpoint, who wrote it, and whether vLLM's CPU backend can run the model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests import generators as g
from tests.e2e.arch.folder import read_folder
from tests.generators import Truth

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

TOLERANCE_FP8 = 0.1
"""Where vLLM rounds activations to E4M3, and the reference does: a value that sums in another order can round to the neighbour,
which is 6 to 12 % away."""
TOLERANCE = 1e-3
"""Of a log-probability, in float32. vLLM and transformers add in other orders; without moet they differ by up to 1e-4 here."""

DSA = "vLLM 0.32: sparse attention (DSA) is not supported on CPU"
DENSE_FP4 = "vLLM 0.32 finds no CPU kernel for NVFP4 or MXFP4 linear layers, which the attention has here; experts-only rows are served"
MODELOPT_MXFP4 = "vLLM 0.32 refuses modelopt's quant_algo mxfp4 on any device"


@dataclass(frozen=True)
class Row:
    """`make` writes (or copies) the checkpoint into a folder. `not_served`: why vLLM's CPU backend cannot run it; empty: it does.
    `ci_serves`: the test suite serves it too."""

    id: str
    model: str
    format: str
    made_by: str
    make: Callable[[Path], Truth] = field(repr=False)
    not_served: str = ""
    ci_serves: bool = False
    tolerance: float = TOLERANCE


def _fixture(name: str) -> Callable[[Path], Truth]:
    def make(out: Path) -> Truth:
        shutil.copytree(FIXTURES / name, out, ignore=shutil.ignore_patterns("tool"))
        return read_folder(out)

    return make


def _generated(
    id: str,
    model: str,
    format: str,
    write: Callable[..., Truth],
    not_served: str = "",
    ci: bool = False,
    tolerance: float = TOLERANCE,
    **options: object,
) -> Row:
    return Row(id, model, format, "generator", partial(write, **options), not_served, ci, tolerance)


def _exported(
    name: str, model: str, format: str, tool: str, not_served: str = "", tolerance: float = TOLERANCE
) -> Row:
    return Row(name, model, format, tool, _fixture(name), not_served, False, tolerance)


SIZES = "vLLM's CPU kernel for latent attention takes the published sizes only, too large for a fixture; the generator's row is served"
V4 = "vLLM 0.32 packs DeepSeek-V4's weights with an operation that its AVX2 build lacks (convert_weight_packed)"
STATIC = "vLLM 0.32: its CPU build lacks static_scaled_fp8_quant, for the attention's linears with static FP8 activations"
ONE_BLOCK = "modelopt writes a scalar where a matrix is one block, which vLLM's loader refuses for the attention of a model this small"

ROWS: tuple[Row, ...] = (
    _generated("deepseek-v2-bf16", "DeepSeek-V2", "BF16", g.write_deepseek_v2),
    _generated("deepseek-v3-bf16", "DeepSeek-V3", "BF16, with MTP", g.write_deepseek_v3),
    _generated(
        "deepseek-v3-fp8",
        "DeepSeek-V3",
        "FP8, 128 x 128, F32 scales, with MTP",
        g.write_deepseek_v3,
        scheme="fp8_block",
    ),
    _generated(
        "deepseek-v3-nvfp4",
        "DeepSeek-V3",
        "NVFP4 (modelopt layout), BF16 MTP",
        g.write_deepseek_v3,
        ci=True,
        scheme="nvfp4_modelopt",
    ),
    _generated(
        "deepseek-v3-nvfp4-hf-quant",
        "DeepSeek-V3",
        "NVFP4, hf_quant_config.json only, gate and up multipliers differ",
        g.write_deepseek_v3,
        scheme="nvfp4_modelopt",
        hf_quant_only=True,
        split_multipliers=True,
    ),
    _generated(
        "deepseek-v3.2-fp8",
        "DeepSeek-V3.2",
        "FP8, 128 x 128, F32 scales, with MTP",
        g.write_deepseek_v32,
        DSA,
    ),
    _generated("deepseek-v4-flash", "DeepSeek-V4-Flash", "MXFP4, with MTP", g.write_deepseek_v4, V4),
    _generated(
        "deepseek-v4-flash-base",
        "DeepSeek-V4-Flash-Base",
        "FP8, 128 x 128, F32 scales, with MTP",
        g.write_deepseek_v4,
        V4,
        scheme="fp8_block_v4",
    ),
    _generated("kimi-k2-fp8", "Kimi-K2", "FP8, 128 x 128, F32 scales", g.write_kimi_k2),
    _generated(
        "kimi-k2-nvfp4", "Kimi-K2", "NVFP4 (modelopt layout)", g.write_kimi_k2, scheme="nvfp4_modelopt"
    ),
    _generated(
        "kimi-k2.5-nvfp4",
        "Kimi-K2.5 and later",
        "NVFP4 (modelopt layout), vision tower",
        g.write_kimi_k25,
    ),
    _generated("glm-4.5-bf16", "GLM-4.5", "BF16, with MTP", g.write_glm4_moe),
    _generated(
        "glm-4.5-fp8",
        "GLM-4.5",
        "FP8, a scale per row (compressed-tensors layout), FP8 activations, with MTP",
        g.write_glm4_moe,
        scheme="fp8_channel_compressed",
        tolerance=TOLERANCE_FP8,
    ),
    _generated("glm-5-fp8", "GLM-5, 5.2", "FP8, 128 x 128, F32 scales, with MTP", g.write_glm_moe_dsa, DSA),
    _generated(
        "glm-5-nvfp4",
        "GLM-5, 5.2",
        "NVFP4 (modelopt layout), BF16 MTP",
        g.write_glm_moe_dsa,
        DSA,
        scheme="nvfp4_modelopt",
    ),
    _generated("qwen3-moe-bf16", "Qwen3-MoE", "BF16", g.write_qwen3_moe),
    _generated(
        "qwen3-moe-fp8",
        "Qwen3-MoE",
        "FP8, 128 x 128, BF16 scales",
        g.write_qwen3_moe,
        ci=True,
        scheme="fp8_block_bf16",
    ),
    _generated(
        "qwen3-moe-fp8-partial",
        "Qwen3-MoE",
        "FP8, 128 x 128, partial blocks",
        g.write_qwen3_moe,
        scheme="fp8_block",
        dense="bf16",
        hidden=320,
        inter=160,
    ),
    _generated(
        "qwen3-moe-mxfp4",
        "Qwen3-MoE",
        "MXFP4 (compressed-tensors layout)",
        g.write_qwen3_moe,
        scheme="mxfp4_compressed",
    ),
    _generated(
        "qwen3-moe-nvfp4",
        "Qwen3-MoE",
        "NVFP4 (compressed-tensors layout)",
        g.write_qwen3_moe,
        scheme="nvfp4_compressed",
    ),
    _generated("gpt-oss-mxfp4", "gpt-oss", "MXFP4, fused, biases", g.write_gpt_oss),
    _generated("gpt-oss-bf16", "gpt-oss", "BF16, fused, biases", g.write_gpt_oss, quantized=False),
    _generated("mixtral-bf16", "Mixtral", "BF16", g.write_mixtral),
    _generated("olmoe-bf16", "OLMoE", "BF16", g.write_olmoe),
    _generated("minimax-m2-fp8", "MiniMax-M2", "FP8, 128 x 128, F32 scales", g.write_minimax_m2),
    _exported("qwen3-moe-nvfp4-modelopt", "Qwen3-MoE", "NVFP4, all linears", "modelopt", DENSE_FP4),
    _exported("qwen3-moe-nvfp4-experts-modelopt", "Qwen3-MoE", "NVFP4, experts only", "modelopt"),
    _exported(
        "qwen3-moe-fp8-modelopt",
        "Qwen3-MoE",
        "FP8, a scale per matrix, static FP8 activations",
        "modelopt",
        STATIC,
    ),
    _exported(
        "qwen3-moe-fp8-block-modelopt", "Qwen3-MoE", "FP8, 128 x 128, 4-D F32 scales", "modelopt", ONE_BLOCK
    ),
    _exported("qwen3-moe-mxfp4-modelopt", "Qwen3-MoE", "MXFP4, all linears", "modelopt", MODELOPT_MXFP4),
    _exported("qwen3-moe-nvfp4-llmcompressor", "Qwen3-MoE", "NVFP4, all linears", "llmcompressor", DENSE_FP4),
    _exported("qwen3-moe-mxfp4-llmcompressor", "Qwen3-MoE", "MXFP4, all linears", "llmcompressor", DENSE_FP4),
    _exported(
        "qwen3-moe-fp8-block-llmcompressor",
        "Qwen3-MoE",
        "FP8, 128 x 128, BF16 scales, partial blocks",
        "llmcompressor",
    ),
    _exported(
        "qwen3-moe-fp8-channel-llmcompressor",
        "Qwen3-MoE",
        "FP8, a scale per row, FP8 activations",
        "llmcompressor",
        tolerance=TOLERANCE_FP8,
    ),
    _exported("deepseek-v3-nvfp4-modelopt", "DeepSeek-V3", "NVFP4, experts only", "modelopt", SIZES),
    _exported("glm-5.2-nvfp4-modelopt", "GLM-5.2", "NVFP4, experts only", "modelopt", DSA),
    _exported("minimax-m2-nvfp4-modelopt", "MiniMax-M2", "NVFP4, experts only", "modelopt"),
    _exported("mixtral-nvfp4-modelopt", "Mixtral", "NVFP4, experts only", "modelopt"),
)
