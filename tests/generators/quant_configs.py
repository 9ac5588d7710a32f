"""quantization_config texts, as the publishers and tools write them."""

NVFP4_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT_ALGORITHMS = {
    "nvfp4_modelopt": "NVFP4",
    "fp8_tensor_modelopt": "FP8",
    "fp8_block_modelopt": "fp8_pb_wo",
    "mxfp4_modelopt": "mxfp4",
}
DYNAMIC = {"dynamic": True, "symmetric": True, "type": "float"}
ACTIVATIONS = {
    "fp8_block_compressed": DYNAMIC | {"num_bits": 8, "strategy": "group", "group_size": 128},
    "fp8_channel_compressed": DYNAMIC | {"num_bits": 8, "strategy": "token"},
    "mxfp4_compressed": DYNAMIC
    | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "nvfp4_compressed": None,
}
COMPRESSED = {
    "fp8_block_compressed": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    ),
    "fp8_channel_compressed": ("float-quantized", {"num_bits": 8, "strategy": "channel"}),
    "mxfp4_compressed": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "nvfp4_compressed": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
}


def fp8(block: int = 128, skip: list[str] | None = None, **more: object) -> dict:
    """DeepSeek's and Qwen's FP8 blocks; only some publishers list the modules left out."""
    out = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [block, block],
    } | more
    return out | ({"modules_to_not_convert": skip} if skip else {})


def modelopt(scheme: str, ignore: list[str]) -> dict:
    """modelopt 0.47, in config.json."""
    out: dict = {
        "ignore": ignore,
        "quant_algo": MODELOPT_ALGORITHMS[scheme],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }
    if scheme == "nvfp4_modelopt":
        out["config_groups"] = {
            "group_0": {"input_activations": NVFP4_GROUP, "weights": NVFP4_GROUP, "targets": ["Linear"]}
        }
    return out


def hf_quant(scheme: str, exclude: list[str]) -> dict:
    """modelopt's hf_quant_config.json; older exports have only this file and no key in config.json."""
    quantization: dict = {
        "quant_algo": MODELOPT_ALGORITHMS[scheme],
        "kv_cache_quant_algo": None,
        "exclude_modules": exclude,
    }
    if scheme == "nvfp4_modelopt":
        quantization["group_size"] = 16
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}


def compressed_tensors(scheme: str, ignore: list[str]) -> dict:
    """llmcompressor 0.14 with compressed-tensors 0.20; FP8_BLOCK, FP8_DYNAMIC, MXFP4 and NVFP4A16."""
    packing, weights = COMPRESSED[scheme]
    weights = {"dynamic": False, "symmetric": True, "type": "float", **weights}
    group = {
        "format": packing,
        "input_activations": ACTIVATIONS[scheme],
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": packing,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": "0.20.1",
    }


def for_scheme(scheme: str, skip: list[str]) -> dict:
    """`{"quantization_config": ...}` for a model quantized by one scheme, or {} for BF16; `skip`: modules left alone."""
    if scheme == "bf16":
        return {}
    if scheme in MODELOPT_ALGORITHMS:
        return {"quantization_config": modelopt(scheme, skip)}
    if scheme in COMPRESSED:
        return {"quantization_config": compressed_tensors(scheme, skip)}
    return {"quantization_config": fp8(32 if "32" in scheme else 128, skip)}
