"""Undocumented names of vLLM, Ray and transformers that the package uses, as they were read."""

from tests.unit.compat.private_names import read as _read

_LAYERS = "vllm.model_executor.layers"
_FP8 = f"{_LAYERS}.quantization.fp8"
_FP8_UTILS, _QUANT_UTILS = f"{_LAYERS}.quantization.utils.fp8_utils", f"{_LAYERS}.quantization.utils.quant_utils"
_RELOAD = "vllm.model_executor.model_loader.reload"
_KERNELS = "vllm.model_executor.kernels.linear"


_ATTENTION_KERNEL = "scale alibi_slopes logits_soft_cap"
VLLM = (
    # pausing without the 20 ms that AsyncLLM.pause_generation sleeps
    _read("vllm.v1.engine.async_llm", "AsyncLLM", gives="engine_core"),
    _read("vllm.v1.engine.core_client", "AsyncMPClient.pause_scheduler_async", takes="self mode clear_cache"),
    # keeping the KV cache over updates: recomputing only the requests that are too old
    _read(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        gives="requests running prev_step_scheduled_req_ids",
        takes="vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry "
        "include_finished_set log_stats",
    ),
    _read("vllm.v1.core.sched.scheduler", "Scheduler.add_request", takes="self request"),
    _read(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.reset_prefix_cache",
        takes="self reset_running_requests reset_connector",
    ),
    _read(
        "vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", takes="self request timestamp drop_stale_output"
    ),
    _read("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    _read("vllm.v1.request", "Request", gives="cache_salt block_hashes request_id"),
    _read("vllm.v1.request", "Request.update_block_hashes", takes="self"),
    _read("vllm.v1.request", "Request.is_finished", takes="self"),
    _read(
        "vllm.v1.engine.core",
        "EngineCore.reset_prefix_cache",
        takes="self reset_running_requests reset_connector",
    ),
    # environment variables that are read for each token
    _read("vllm.envs", "enable_envs_cache", takes=""),
    _read("vllm.envs", "disable_envs_cache", takes=""),
    # attribute of vLLM's worker with its transfer engine
    _read("vllm.v1.worker.gpu_worker", "Worker", gives="weight_transfer_engine _sleep_saved_buffers", only_source=True),
    # sleeping: memory under addresses that stay, and what of it is the KV cache
    _read("vllm.device_allocator", "get_mem_allocator_instance", takes=""),
    _read("vllm.device_allocator", "MemAllocator.use_memory_pool", takes="self tag"),
    _read("vllm.device_allocator", "MemAllocator.get_current_usage", takes="self"),
    _read("vllm.config", "CompilationConfig", gives="static_forward_context"),
    # the layerwise reload, and how far it got
    _read(_RELOAD, "initialize_layerwise_reload", takes="model"),
    _read(_RELOAD, "finalize_layerwise_reload", takes="args kwargs"),
    _read(_RELOAD, "finalize_layerwise_processing", takes="model model_config"),
    _read(f"{_RELOAD}.layerwise", "get_layerwise_info", takes="layer"),
    _read(f"{_RELOAD}.layerwise", "make_online_process_loader", takes="layer param_name"),
    _read(f"{_RELOAD}.meta", "SKIP_LOAD_TENSORS"),
    _read(f"{_RELOAD}.types", "LayerReloadingInfo", gives="load_numel"),
    _read(f"{_RELOAD}.utils", "get_tensor_load_numel", takes="tensor"),
    _read(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding"),
    _read(f"{_LAYERS}.vocab_parallel_embedding", "ParallelLMHead"),
    _read(f"{_LAYERS}.mamba.abstract", "MambaBase.mamba_type"),
    _read(f"{_LAYERS}.mamba.mamba_mixer2", "MambaMixer2", gives="conv1d conv_weights", only_source=True),
    _read(f"{_LAYERS}.utils", "dispatch_cpu_unquantized_gemm", gives="_cpu_unpacked_conv_weight", only_source=True),
    # attention: its geometry, its cache and the copies of its scales
    _read(
        f"{_LAYERS}.attention",
        "Attention",
        gives="impl num_heads num_kv_heads head_size head_size_v sliding_window has_sink kv_cache kv_cache_dtype "
        "kv_sharing_target_layer_name",
    ),
    _read(f"{_LAYERS}.attention", "is_deferred_attention_layer", takes="layer"),
    _read(f"{_LAYERS}.attention_layer_base", "AttentionLayerBase.get_attn_backend", takes="self"),
    _read("vllm.v1.attention.backend", "AttentionBackend.get_name", takes=""),
    _read(
        f"{_LAYERS}.attention.attention",
        "set_default_quant_scales",
        takes="layer register_buffer",
        gives="_q_scale _k_scale _v_scale _q_scale_float _k_scale_float _v_scale_float _k_scale_cpu _v_scale_cpu",
    ),
    _read(f"{_LAYERS}.quantization.kv_cache", "BaseKVCacheMethod", takes="quant_config"),
    _read("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl", gives=_ATTENTION_KERNEL, only_source=True),
    _read("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl", gives=_ATTENTION_KERNEL, only_source=True),
    _read("vllm.v1.kv_cache_interface", "is_quantized_kv_cache", takes="kv_cache_dtype"),
    _read(
        "vllm.forward_context",
        "set_forward_context",
        takes="attn_metadata vllm_config num_tokens num_tokens_across_dp cudagraph_runtime_mode batch_descriptor "
        "ubatch_slices slot_mapping skip_compiled is_padding",
    ),
    # FP8 and BF16 layers of CPU engines
    _read(f"{_LAYERS}.linear", "LinearBase"),
    _read(f"{_LAYERS}.linear", "LinearMethodBase.apply", takes="self layer x bias"),
    _read(f"{_LAYERS}.linear", "UnquantizedLinearMethod", takes=""),
    _read(f"{_LAYERS}.linear", "register_weight_loader_v2_supported_method", takes="cls"),
    _read(_FP8, "Fp8Config.get_quant_method", takes="self layer prefix"),
    _read(
        _FP8,
        "Fp8LinearMethod",
        gives="weight_block_size weight_quant_key activation_quant_key input_dtype out_dtype fp8_linear",
    ),
    _read(
        _FP8,
        "Fp8LinearMethod.create_weights",
        takes="self layer input_size_per_partition output_partition_sizes input_size output_size params_dtype "
        "extra_weight_attrs",
    ),
    _read(
        _FP8,
        "Fp8MoEMethod",
        gives="quant_config weight_block_size moe_block_shape block_quant weight_scale_name weight_scale_refine",
    ),
    _read(_FP8, "Fp8MoEMethod.process_weights_after_loading", takes="self layer"),
    _read(
        _FP8,
        "Fp8MoEMethod.apply",
        takes="self layer x topk_weights topk_ids shared_experts shared_experts_input",
    ),
    _read(
        f"{_LAYERS}.quantization.input_quant_fp8",
        "QuantFP8",
        takes="static group_shape num_token_padding column_major_scales tma_aligned_scales use_ue8m0 compile_native",
    ),
    _read(
        _FP8_UTILS,
        "create_fp8_scale_parameter",
        takes="parameter_type output_partition_sizes input_size_per_partition block_size weight_loader scale_dtype",
    ),
    _read(
        _FP8_UTILS,
        "create_fp8_weight_parameter",
        takes="output_size_per_partition input_size_per_partition weight_loader",
    ),
    _read(
        _FP8_UTILS,
        "validate_fp8_block_shape",
        takes="layer input_size output_size input_size_per_partition output_partition_sizes block_size",
    ),
    _read(_QUANT_UTILS, "GroupShape", takes="row col"),
    _read(_QUANT_UTILS, "is_layer_skipped", takes="prefix ignored_layers fused_mapping match_mode"),
    _read("vllm.model_executor.parameter", "BlockQuantScaleParameter"),
    _read("vllm.model_executor.parameter", "ChannelQuantScaleParameter"),
    _read("vllm.model_executor.parameter", "ModelWeightParameter"),
    _read("vllm.model_executor.utils", "set_weight_attrs", takes="weight weight_attrs"),
    _read("vllm.model_executor.models.utils", "WeightsMapper.apply_list"),
    _read(
        _KERNELS,
        "FP8ScaledMMLinearLayerConfig",
        takes="weight_quant_key activation_quant_key weight_shape input_dtype out_dtype",
    ),
    _read(_KERNELS, "Fp8BlockScaledMMLinearKernel.apply_block_scaled_mm", takes="self A B As Bs"),
    _read(_KERNELS, "Fp8BlockScaledMMLinearKernel.can_implement", takes="config"),
    _read(_KERNELS, "Fp8BlockScaledMMLinearKernel.is_supported", takes="compute_capability"),
    _read(_KERNELS, "Fp8BlockScaledMMLinearKernel.process_weights_after_loading", takes="self layer"),
    _read(_KERNELS, "Fp8BlockScaledMMLinearKernel._get_layer_params", takes="self layer kwargs"),
    # experts of CPU engines
    _read(f"{_LAYERS}.fused_moe", "FusedMoEMethodBase", takes="moe", gives="moe_kernel"),
    _read(f"{_LAYERS}.fused_moe", "FusedMoEQuantConfig.make"),
    _read(f"{_LAYERS}.fused_moe", "FusedMoeWeightScaleSupported.CHANNEL"),
    _read(f"{_LAYERS}.fused_moe", "MoEActivation"),
    _read(
        f"{_LAYERS}.fused_moe",
        "RoutedExperts",
        gives="layer_name moe_config activation swiglu_limit apply_router_weight_on_input use_ep",
    ),
    _read(f"{_LAYERS}.fused_moe", "UnquantizedFusedMoEMethod.process_weights_after_loading", takes="self layer"),
    # building a model without weights, to read from it what it makes of a checkpoint's modules
    _read(
        "vllm.model_executor.model_loader.utils",
        "initialize_model",
        takes="vllm_config prefix model_class model_config",
    ),
    _read("vllm.utils.torch_utils", "set_default_torch_dtype", takes="dtype"),
    _read("vllm.distributed", "init_distributed_environment"),
    _read("vllm.distributed", "initialize_model_parallel"),
    _read("vllm.distributed", "destroy_model_parallel", takes=""),
    _read("vllm.distributed", "destroy_distributed_environment", takes=""),
    _read(f"{_LAYERS}.linear", "LinearBase", gives="output_size disable_tp"),
    _read(f"{_LAYERS}.linear", "ReplicatedLinear"),
    _read(f"{_LAYERS}.linear", "RowParallelLinear"),
    _read(f"{_LAYERS}.linear", "ColumnParallelLinear"),
    _read(f"{_LAYERS}.linear", "MergedColumnParallelLinear", gives="output_sizes"),
    _read(
        f"{_LAYERS}.linear",
        "QKVParallelLinear",
        gives="total_num_heads total_num_kv_heads head_size v_head_size",
    ),
    _read(f"{_LAYERS}.fused_moe", "FusedMoEConfig", gives="num_logical_experts"),
    # joining a trainer's NCCL group as a rank that is no engine's
    _read(
        "vllm.distributed.weight_transfer.nccl_common",
        "uid_init_process_group",
        takes="nccl_unique_id_bytes rank world_size device",
    ),
    _read(
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator",
        takes="group device library_path",
        gives="disabled",
    ),
    _read(
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator.broadcast",
        takes="self tensor src stream",
    ),
    _read("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.destroy", takes="self"),
    _read("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"),
    _read("vllm.distributed.utils", "StatelessProcessGroup.broadcast_obj", takes="self obj src"),
    # metrics
    _read(
        "vllm.v1.metrics.ray_wrappers",
        "RayPrometheusStatLogger.record",
        takes="self scheduler_stats iteration_stats mm_cache_stats engine_idx",
    ),
    _read(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        gives="num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage",
    ),
    _read("vllm.v1.metrics.stats", "IterationStats", gives="inter_token_latencies_iter"),
    # what requests that run have made so far
    _read("vllm.v1.engine.async_llm", "AsyncLLM", gives="output_processor"),
    _read("vllm.v1.engine.output_processor", "OutputProcessor", gives="request_states external_req_ids"),
    _read(
        "vllm.v1.engine.output_processor",
        "RequestState",
        gives="parent_req request_index logprobs_processor detokenizer sampling_mask_chunks weight_version_starts",
    ),
    _read("vllm.v1.engine.output_processor", "RequestState.track_weight_version", takes="self weight_version"),
    _read("vllm.v1.engine.detokenizer", "IncrementalDetokenizer", gives="output_token_ids"),
    _read("vllm.v1.engine.logprobs", "LogprobsProcessor", gives="logprobs"),
    _read("vllm.v1.engine.parallel_sampling", "ParentRequest", gives="output_aggregator"),
    _read("vllm.v1.outputs", "SamplingMaskLists.to_nested_list", takes="self"),
    _read("vllm.v1.outputs", "SamplingMaskLists", takes="token_ids offsets cu_num_generated_tokens"),
)


_BACKEND, _FLASH = "vllm.v1.attention.backend", "vllm.v1.attention.backends.flash_attn"


ATTENTION = (
    _read(_BACKEND, "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE"),
    _read(_BACKEND, "AttentionType.DECODER"),
    _read(
        _BACKEND,
        "CommonAttentionMetadata",
        gives="seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor causal",
    ),
    _read(_FLASH, "FlashAttentionBackend.get_builder_cls", takes=""),
    _read(
        _FLASH,
        "FlashAttentionMetadataBuilder",
        takes="kv_cache_spec layer_names vllm_config device",
        gives="attention_config block_size cache_config headdim kv_cache_dtype max_cudagraph_size num_heads_kv "
        "num_heads_q requires_block_table_width supports_draft_decode_metadata_update supports_update_block_table",
    ),
    _read(
        _FLASH,
        "FlashAttentionMetadataBuilder.build",
        takes="self common_prefix_len common_attn_metadata fast_build",
    ),
    _read(_FLASH, "FlashAttentionMetadata", gives="max_seq_len"),
    _read(
        _FLASH,
        "FlashAttentionImpl",
        gives="alibi_slopes head_size kv_cache_dtype logits_soft_cap num_queries_per_kv scale sinks sliding_window "
        "vllm_flash_attn_version",
    ),
    _read(
        _FLASH,
        "FlashAttentionImpl.forward",
        takes="self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    _read("vllm.utils.torch_utils", "canonicalize_singleton_dim_strides", takes="t"),
    _read("vllm.v1.kv_cache_interface", "is_quantized_kv_cache", takes="kv_cache_dtype"),
    _read(
        "vllm.model_executor.layers.attention.attention",
        "set_default_quant_scales",
        takes="layer register_buffer",
        gives="_q_scale _k_scale _v_scale",
    ),
)


_OPENAI = "vllm.entrypoints.openai"


SERVING = (
    _read(
        "vllm.engine.protocol",
        "EngineClient.generate",
        takes="self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs trace_headers "
        "priority data_parallel_rank session_id kv_hints reasoning_ended reasoning_parser_kwargs",
    ),
    _read(
        f"{_OPENAI}.chat_completion.serving",
        "OpenAIServingChat.create_chat_completion",
        takes="self request raw_request",
    ),
    # overridden in gateway/openai/recording.py: under another name, turns of sessions would be lost
    _read(f"{_OPENAI}.chat_completion.serving", "OpenAIServingChat.chat_completion_full_generator"),
    _read(f"{_OPENAI}.chat_completion.serving", "OpenAIServingChat.chat_completion_stream_generator"),
    _read(f"{_OPENAI}.responses.serving", "OpenAIServingResponses.responses_full_generator"),
    _read(f"{_OPENAI}.responses.serving", "OpenAIServingResponses.responses_stream_generator"),
    _read("vllm.parser", "Parser.parse", takes="self model_output request enable_auto_tools model_output_token_ids"),
    _read("vllm.parser", "Parser.parse_delta"),
    _read("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages.message_stream_converter"),
    _read(
        "vllm.renderers.online_renderer",
        "OnlineRenderer.preprocess_chat",
        takes="self request messages default_template default_template_content_format default_template_kwargs "
        "tool_dicts parser skip_mm_cache",
    ),
    _read("vllm.renderers.online_renderer", "OnlineRenderer.render_chat", takes="self request skip_mm_cache"),
    _read("vllm.renderers.online_renderer", "OnlineRenderer.render_responses"),
    _read("vllm.renderers.base", "BaseRenderer.render_messages_async", takes="self messages params"),
    _read("vllm.renderers.base", "BaseRenderer.tokenize_prompt_async", takes="self prompt params"),
    _read("vllm.renderers.base", "BaseRenderer.get_eos_token_id", takes="self"),
    _read("vllm.config", "ModelConfig.try_get_generation_config", takes="self"),
    _read(f"{_OPENAI}.responses.serving", "OpenAIServingResponses.create_responses"),
    _read(f"{_OPENAI}.responses.utils", "construct_chat_messages_with_tool_call", takes="input_messages"),
    _read(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages.create_messages",
        takes="self request raw_request",
    ),
    _read("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages.count_tokens"),
    _read(
        "vllm.entrypoints.serve.tokenize.serving",
        "ServingTokenization.create_tokenize",
        takes="self request raw_request",
    ),
    _read("vllm.entrypoints.serve.tokenize.serving", "ServingTokenization.create_detokenize"),
    _read(f"{_OPENAI}.models.serving", "OpenAIServingModels", takes="engine_client base_model_paths lora_modules"),
)


RAY = (
    _read("ray.serve._private.constants", "SERVE_CONTROLLER_NAME"),
    _read("ray.serve._private.constants", "SERVE_NAMESPACE"),
    _read("ray.serve._private.controller", "ServeController.check_alive", takes="self"),
    _read("ray.serve._private.controller", "ServeController.get_http_config", takes="self"),
    _read("ray.serve._private.controller", "ServeController.graceful_shutdown", takes="self wait"),
)


TRANSFORMERS = (
    _read("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    _read("transformers.modeling_utils", "PreTrainedModel._keep_in_fp32_modules_strict"),
    _read("transformers.modeling_utils", "PreTrainedModel._keys_to_ignore_on_load_unexpected"),
    _read("transformers.modeling_utils", "PreTrainedModel.base_model_prefix"),
    _read("transformers.core_model_loading", "revert_weight_conversion", takes="model state_dict"),
    _read("transformers", "PretrainedConfig._attn_implementation"),
    _read("transformers.activations", "SiLUActivation"),
    _read(
        "transformers.models.qwen3.modeling_qwen3",  # the same in the file of every other model
        "eager_attention_forward",
        takes="module query key value attention_mask scaling dropout kwargs",
    ),
)


NAMES = (*VLLM, *ATTENTION, *SERVING, *RAY, *TRANSFORMERS)
