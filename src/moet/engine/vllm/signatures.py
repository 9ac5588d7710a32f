"""Parameters of what moet touches in vLLM, by minor version: `compat.shape` of each. Read from the unmodified wheels of 0.32.0 and 0.33.0."""

from typing import Final

_SAME: Final[dict[str, dict[str, str]]] = {
    "engine": {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config": "self, usage_context=, headless=",
        "vllm.model_executor.layers.quantization:register_quantization_config": "quantization",
        "vllm.model_executor.layers.quantization.base_config:resolve_quant_method": "quant_config, layer, prefix",
        "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.get_quant_method": "self, layer, prefix",
        "vllm.model_executor.layers.quantization.fp8:Fp8Config.get_quant_method": "self, layer, prefix",
        "vllm.model_executor.layers.quantization.modelopt:ModelOptQuantConfigBase.get_quant_method": "self, layer, prefix",
        "vllm.model_executor.layers.quantization.modelopt:ModelOptMixedPrecisionConfig.get_quant_method": "self, layer, prefix",
        "vllm.model_executor.layers.quantization.mxfp4:Mxfp4Config.get_quant_method": "self, layer, prefix",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.get_quant_method": (
            "self, layer, prefix"
        ),
        "vllm.models.deepseek_v4.quant_config:DeepseekV4FP8Config.get_quant_method": "self, layer, prefix",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.__init__": "self, moe",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.create_weights": (
            "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs"
        ),
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.apply": (
            "self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input"
        ),
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config": "self, layer",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes": (
            "self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config"
        ),
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.forward_modular": (
            "self, x, topk_weights, topk_ids, shared_experts=, shared_experts_input="
        ),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._apply_quant_method": (
            "self, hidden_states, router_logits, shared_experts_input, input_ids=, shared_experts_overlapping="
        ),
        "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel:Fp8BlockScaledMMLinearKernel.apply_weights": (
            "self, layer, x, bias=, **kwargs"
        ),
        "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel:Fp8BlockScaledMMLinearKernel.process_weights_after_loading": (
            "self, layer"
        ),
        "vllm.model_executor.kernels.linear:init_fp8_linear_kernel": (
            "activation_quant_key, weight_quant_key, input_dtype, out_dtype, weight_shape, force_kernel=, module_name="
        ),
        "vllm.utils.torch_utils:direct_register_custom_op": (
            "op_name, op_func, mutates_args=, fake_impl=, target_lib=, dispatch_key=, tags="
        ),
        "vllm.forward_context:get_forward_context": "",
        "vllm.forward_context:create_forward_context": (
            "attn_metadata, vllm_config, dp_metadata=, cudagraph_runtime_mode=, batch_descriptor=, ubatch_slices=, slot_mapping=, additional_kwargs=, skip_compiled=, is_padding="
        ),
        "vllm.model_executor.model_loader:register_model_loader": "load_format",
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader._prepare_weights": (
            "self, model_name_or_path, subfolder, revision, fall_back_to_pt, allow_patterns_overrides"
        ),
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader._get_weights_iterator": "self, source",
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights": "self, model, model_config",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "self, scheduler_output, model_runner_output",
        "vllm.v1.engine.core:EngineCoreProc._handle_shutdown": "self",
        "vllm.v1.engine.core:EngineCoreProc._send_abort_outputs": "self, aborted_reqs",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "self, request_ids, finished_status",
        "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state": "self, pause_state",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks": "self, block_ids",
    },
    "http": {
        "vllm.entrypoints.openai.models.serving:OpenAIModelRegistry.show_available_models": "self",
        "vllm.entrypoints.generate.base.serving:GenerateBaseServing._raise_if_error": "self, finish_reason, request_id",
    },
}  # fmt: skip

# Runner V2 of 0.33, which the GPU path is made for. What moet overrides is Worker's; of the rest it relies on what they hand on.
_CUDA: Final[dict[str, str]] = {
    "vllm.v1.worker.gpu_worker:Worker.load_model": "self, *, load_dummy_weights=",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": "self",
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": "self, kv_cache_config",
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": "self",
    "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec": "self",
    "vllm.v1.worker.gpu_worker:Worker.shutdown": "self",
    "vllm.v1.kv_cache_interface:KVCacheSpec.max_memory_usage_bytes": "self, vllm_config",
    "vllm.v1.worker.gpu.block_table:BlockTables.compute_slot_mappings": (
        "self, idx_mapping, query_start_loc, positions, num_tokens_padded, out="
    ),
    "vllm.v1.worker.gpu.block_table:BlockTables.get_dummy_slot_mappings": "self, num_tokens",
    "vllm.v1.worker.gpu.attn_utils:build_slot_mappings_by_layer": "slot_mappings, kv_cache_config",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.__init__": (
        "self, vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=, varlen_decode=, ubatch_runner="
    ),
    "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture": (
        "num_reqs, num_tokens, model_state, input_buffers, block_tables, attn_groups, kv_cache_config, full_cudagraph, max_query_len=, pcp_manager="
    ),
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator._run_model": (
        "self, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, mm_inputs="
    ),
}  # fmt: skip

# No parameter of the others differs between the two versions. Where one does, its version gets a table of its own:
# {**_SAME, "engine": {**_SAME["engine"], ...}}.
SIGNATURES: Final[dict[str, dict[str, dict[str, str]]]] = {"0.32": _SAME, "0.33": {**_SAME, "cuda": _CUDA}}
