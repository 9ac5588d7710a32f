"""How a checkpoint stores one linear layer: the tensors beside its name, and the value they mean.

A scheme maps (module name, float matrix [N, K]) to `Stored`. The keys are those of the tools and publishers:
reference files of DeepSeek, Qwen, GLM, MiniMax (FP8 blocks), DeepSeek-V4 (MXFP4), modelopt 0.47, compressed-tensors 0.20.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import numbers as nb

ITEM = {
    "F32": "<f4",
    "BF16": "<u2",
    "F16": "<f2",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
    "U8": "u1",
    "I8": "i1",
    "I64": "<i8",
    "I32": "<i4",
}


@dataclass(frozen=True)
class Raw:
    """A tensor as bytes: safetensors' dtype name, and an array of the item type of that dtype (BF16 as uint16)."""

    dtype: str
    data: np.ndarray


@dataclass(frozen=True)
class Stored:
    """The tensors of one linear layer by their full names, and its dequantized value: float64 [N, K]."""

    tensors: dict[str, Raw]
    value: np.ndarray


Scheme = Callable[..., Stored]


def raw(dtype: str, values: np.ndarray) -> Raw:
    """Numbers to a tensor of a float or integer dtype, rounded to nearest even."""
    if dtype == "BF16":
        return Raw(dtype, nb.to_bf16(values))
    return Raw(dtype, np.ascontiguousarray(values, ITEM[dtype]))


def bf16(name: str, x: np.ndarray, **_: object) -> Stored:
    bits = nb.to_bf16(x)
    return Stored({f"{name}.weight": Raw("BF16", bits)}, nb.from_bf16(bits).astype(np.float64))


def _scale(dtype: str, exact: np.ndarray) -> tuple[Raw, np.ndarray]:
    """A scale rounded to its dtype (E8M0: up), and its value in float64."""
    if dtype == "F8_E8M0":
        byte = nb.power_of_two_above(exact)
        return Raw(dtype, byte), nb.ue8m0(byte)
    tensor = raw(dtype, exact)
    value = nb.from_bf16(tensor.data) if dtype == "BF16" else tensor.data
    return tensor, value.astype(np.float64)


def fp8_block(
    scale_dtype: str, block: int = 128, suffix: str = "weight_scale_inv", four_d: bool = False
) -> Scheme:
    """F8_E4M3 with a scale per block x block; `four_d` is modelopt's [N/128, 1, K/128, 1]."""

    def scheme(name: str, x: np.ndarray, **_: object) -> Stored:
        scale, value = _scale(scale_dtype, np.maximum(nb.blocks(x, block, block), 1e-12) / nb.FP8_MAX)
        full = nb.spread(value, block, block, x.shape)
        codes = nb.to_e4m3(x / full)
        if four_d:
            scale = Raw(scale.dtype, scale.data[:, None, :, None])
        return Stored(
            {f"{name}.weight": Raw("F8_E4M3", codes), f"{name}.{suffix}": scale}, nb.E4M3[codes] * full
        )

    return scheme


def fp8_channel(name: str, x: np.ndarray, **_: object) -> Stored:
    """compressed-tensors FP8_DYNAMIC: one BF16 scale a row, [N, 1]."""
    scale, value = _scale("BF16", np.maximum(np.abs(x).max(1, keepdims=True), 1e-12) / nb.FP8_MAX)
    codes = nb.to_e4m3(x / value)
    return Stored(
        {f"{name}.weight": Raw("F8_E4M3", codes), f"{name}.weight_scale": scale}, nb.E4M3[codes] * value
    )


def fp8_tensor(name: str, x: np.ndarray, **_: object) -> Stored:
    """modelopt FP8: one F32 scalar a matrix, and the activations' scalar."""
    scale, value = _scale("F32", np.float64(np.abs(x).max() / nb.FP8_MAX))
    codes = nb.to_e4m3(x / value)
    tensors = {
        f"{name}.weight": Raw("F8_E4M3", codes),
        f"{name}.weight_scale": scale,
        f"{name}.input_scale": raw("F32", np.float64(0.01)),
    }
    return Stored(tensors, nb.E4M3[codes] * value)


def mxfp4(weight: str, scale: str, weight_dtype: str = "U8", scale_dtype: str = "U8") -> Scheme:
    """E2M1 with a power of two per 32 along K, under the names of the publisher."""

    def scheme(name: str, x: np.ndarray, **_: object) -> Stored:
        byte = nb.power_of_two_above(nb.blocks(x, 1, 32) / nb.FP4_MAX)
        full = nb.spread(nb.ue8m0(byte), 1, 32, x.shape)
        codes = nb.to_e2m1(x / full)
        packed = nb.pack_nibbles(codes).view(ITEM[weight_dtype])
        return Stored(
            {f"{name}.{weight}": Raw(weight_dtype, packed), f"{name}.{scale}": Raw(scale_dtype, byte)},
            nb.E2M1[codes] * full,
        )

    return scheme


def _nvfp4(x: np.ndarray, multiplier: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed codes, E4M3 scale bytes, value) for a given float32 multiplier; scales are clamped to [2^-9, 448]."""
    wanted = np.clip(nb.blocks(x, 1, 16) / (nb.FP4_MAX * multiplier), 2.0**-9, nb.FP8_MAX)
    scale = nb.to_e4m3(wanted)
    full = nb.spread(nb.E4M3[scale] * multiplier, 1, 16, x.shape)
    codes = nb.to_e2m1(x / full)
    return nb.pack_nibbles(codes), scale, nb.E2M1[codes] * full


def nvfp4_modelopt(name: str, x: np.ndarray, amax: float | None = None, **_: object) -> Stored:
    """U8, F8_E4M3 per 16, F32 scalars weight_scale_2 (multiplies) and input_scale. gate and up share `amax`."""
    multiplier = np.float32((np.abs(x).max() if amax is None else amax) / (nb.FP4_MAX * nb.FP8_MAX))
    packed, scale, value = _nvfp4(x, float(multiplier))
    return Stored(
        {
            f"{name}.weight": Raw("U8", packed),
            f"{name}.weight_scale": Raw("F8_E4M3", scale),
            f"{name}.weight_scale_2": raw("F32", np.array(multiplier)),
            f"{name}.input_scale": raw("F32", np.array(0.002)),
        },
        value,
    )


def nvfp4_compressed(name: str, x: np.ndarray, amax: float | None = None, **_: object) -> Stored:
    """compressed-tensors: the global scale is stored as its reciprocal, F32 [1]; its float32 inverse multiplies."""
    stored = np.float32(nb.FP4_MAX * nb.FP8_MAX / (np.abs(x).max() if amax is None else amax))
    packed, scale, value = _nvfp4(x, float(np.float32(1) / stored))
    return Stored(
        {
            f"{name}.weight_packed": Raw("U8", packed),
            f"{name}.weight_scale": Raw("F8_E4M3", scale),
            f"{name}.weight_global_scale": raw("F32", np.array([stored])),
        },
        value,
    )


SCHEMES: dict[str, Scheme] = {
    "bf16": bf16,
    "fp8_block": fp8_block("F32"),
    "fp8_block_bf16": fp8_block("BF16"),
    "fp8_block_f16": fp8_block("F16"),
    "fp8_block_e8m0": fp8_block("F8_E8M0", suffix="scale"),
    "fp8_block32_e8m0": fp8_block("F8_E8M0", 32, suffix="scale"),
    "fp8_block_v4": fp8_block("F32", suffix="scale"),
    "fp8_block_modelopt": fp8_block("F32", suffix="weight_scale", four_d=True),
    "fp8_block_compressed": fp8_block("BF16", suffix="weight_scale"),
    "fp8_channel_compressed": fp8_channel,
    "fp8_tensor_modelopt": fp8_tensor,
    "mxfp4_v4": mxfp4("weight", "scale", "I8", "F8_E8M0"),
    "mxfp4_modelopt": mxfp4("weight", "weight_scale"),
    "mxfp4_compressed": mxfp4("weight_packed", "weight_scale"),
    "nvfp4_modelopt": nvfp4_modelopt,
    "nvfp4_compressed": nvfp4_compressed,
}

FORMATS: dict[str, str] = {
    name: "fp8_row" if name == "fp8_channel_compressed" else name.split("_")[0].removesuffix("32")
    for name in SCHEMES
}
"""moet's word for what a scheme stores: "bf16", "fp8", "fp8_row", "mxfp4", "nvfp4"."""
