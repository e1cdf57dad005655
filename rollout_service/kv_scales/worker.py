"""The vLLM worker's part of an FP8 KV cache's scales: measure q, k and v, and load the resulting scales.

Measuring is a separate forward pass while the engine is paused. It is eager, since compiled code skips hooks, and uses
neither KV cache nor scheduler. Hooks on vLLM's attention layers, which return nothing useful without a cache, compute
attention from q, k and v before any rounding. The measurement therefore does not depend on the engine's current scales,
and equals the trainer's forward pass.

vLLM stores each scale several times: as a tensor on the device, as a Python float, and for k and v also as a tensor on
the host. Different kernels read different copies. Scales are therefore only changed by vLLM's own loader, on the
attention layers alone, and read back afterwards. They follow a version regardless of how its weights were loaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from vllm.config import ModelConfig, VllmConfig

from rollout_service.compat.vllm_internals import (
    Attention,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    is_quantized_kv_cache,
    kv_scale,
    kv_scale_copies,
    select_no_adapter,
    set_forward_context,
)
from rollout_service.errors import InvalidRequest
from rollout_service.kv_scales.fp8_error import ErrorSums, masked_amax
from rollout_service.kv_scales.scales import TENSORS, LayerScales
from rollout_service.protocol.kv_scales import KVMeasurement

MAX_TOKENS = 2048
"""Maximum tokens of one pass, including padding. Also limited by the engine's maximum tokens per step, since no more
memory is reserved."""
_ATTENTION = ".attn"
"""Name of vLLM's module inside the module that a checkpoint names: ``model.layers.0.self_attn`` has ``.attn``."""


def measure_kv(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    device: torch.device,
    sequences: Sequence[Sequence[int]],
    scales: Mapping[str, float] | None = None,
) -> KVMeasurement:
    """Run ``sequences`` of token ids through the model, several in each forward pass.

    Args:
        scales: scales against which errors are measured, by ``<layer>.{q,k,v}_scale``; None: the engine's.

    Raises InvalidRequest for unsupported attention (with the reason), or without any sequence.
    """
    layers = layers_by_name(model)
    if not layers or not sequences:
        raise InvalidRequest(f"nothing to measure: {len(layers)} layers with an FP8 cache, {len(sequences)} sequences")
    for name, layer in layers.items():
        _require_computable(name, layer, vllm_config)
    watches = {name: _Watch(layer, _against(name, layer, scales)) for name, layer in layers.items()}
    limit = min(MAX_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens)
    sequences = [sequence[:limit] for sequence in sequences]
    with ExitStack() as hooks, torch.inference_mode():
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(watches[name]).remove)
        for rows in _batches(sequences, limit):
            _forward(model, vllm_config, device, rows, watches)
    return KVMeasurement(
        amax={name: watch.amax() for name, watch in watches.items()},
        errors={name: watch.sums.result() for name, watch in watches.items()},
        tokens=sum(map(len, sequences)),
    )


class _Watch:
    """A forward hook of one attention layer: measures its arguments, and replaces its result by computed attention."""

    counts: torch.Tensor
    """[batch, tokens] bool: not padding."""

    def __init__(self, layer: Attention, scales: LayerScales) -> None:
        self.sums = ErrorSums(scales)
        self._passes: list[torch.Tensor] = []
        self._heads, self._kv_heads = layer.num_heads, layer.num_kv_heads
        self._scaling: float = layer.impl.scale
        self._window: int | None = layer.sliding_window

    def __call__(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            x.reshape(*self.counts.shape, heads, -1).transpose(1, 2)
            for x, heads in zip(args[:3], (self._heads, self._kv_heads, self._kv_heads), strict=True)
        )
        self._passes.append(torch.stack([masked_amax(x, self.counts) for x in (q, k, v)]))
        self.sums.add(q, k, v, self.counts, self.counts, self._scaling)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask(), is_causal=self._window is None, scale=self._scaling, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(answer.shape)

    def amax(self) -> tuple[tuple[float, float, float], ...]:
        """Return the largest values of each pass."""
        return tuple((q, k, v) for q, k, v in torch.stack(self._passes).double().tolist())

    def _mask(self) -> torch.Tensor | None:
        """Return the mask of a sliding window. Padding is at the end, to which no position attends."""
        if self._window is None:
            return None
        tokens = self.counts.shape[1]
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=self.counts.device)
        return ones.tril() & ones.triu(1 - self._window)


def _forward(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    device: torch.device,
    rows: Sequence[Sequence[int]],
    watches: Mapping[str, _Watch],
) -> None:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    positions = torch.arange(longest, device=device).expand(len(rows), -1)
    for watch in watches.values():
        watch.counts = positions < lengths[:, None]
    select_no_adapter(model, len(rows), ids.numel())
    with set_forward_context(None, vllm_config, num_tokens=ids.numel(), skip_compiled=True):
        model(input_ids=ids.flatten(), positions=positions.flatten())


def _batches(sequences: Sequence[Sequence[int]], limit: int) -> Iterator[list[Sequence[int]]]:
    """Yield rows of similar length, longest first, of at most ``limit`` tokens including padding; at least one row."""
    ordered = sorted(sequences, key=len, reverse=True)
    while ordered:
        count = max(1, limit // len(ordered[0]))
        yield ordered[:count]
        ordered = ordered[count:]


def _against(name: str, layer: Attention, scales: Mapping[str, float] | None) -> LayerScales:
    if scales is None:
        return LayerScales(**{x: copies[0] for x, copies in held_scales(layer).items()})
    return LayerScales(**{x: scales[f"{name}.{x}_scale"] for x in TENSORS})


def _require_computable(name: str, layer: Attention, vllm_config: VllmConfig) -> None:
    impl = layer.impl
    reasons = {
        "attention sinks": bool(layer.has_sink),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "a soft cap on logits": bool(getattr(impl, "logits_soft_cap", None)),
        "keys and values of another layer": layer.kv_sharing_target_layer_name is not None,
        "values of another head size than keys": layer.head_size_v != layer.head_size,
        "positions of several dimensions": bool(vllm_config.model_config.uses_mrope),
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise InvalidRequest(f"q, k and v of {name} cannot be measured: its attention has {', '.join(found)}")


def load_kv_scales(model: torch.nn.Module, model_config: ModelConfig, scales: Mapping[str, float] | None) -> int:
    """Give every layer with an FP8 cache its q, k and v scales; return the number of scales loaded.

    Layers with unchanged scales are left alone. The KV cache must be empty: cached codes would mean other values.

    Args:
        scales: by ``model.layers.N.self_attn.{q,k,v}_scale``. None: 1 for all.

    Raises RuntimeError if a name does not belong to a layer, a layer gets none, or vLLM holds other scales afterwards.
    """
    layers = layers_by_name(model)
    if not layers:  # a BF16 cache
        return 0
    named = {f"{name}.{x}_scale": 1.0 for name in layers for x in TENSORS} if scales is None else dict(scales)
    wanted = {name: torch.tensor(value, dtype=torch.float32) for name, value in named.items()}
    expected = {f"{name}.{x}_scale" for name in layers for x in TENSORS}
    if wanted.keys() != expected:
        missing, unknown = sorted(expected - wanted.keys()), sorted(wanted.keys() - expected)
        raise RuntimeError(
            f"the version has {len(wanted)} KV scales, not the {len(expected)} of this engine's layers: missing "
            f"{missing[:3]}, unknown {unknown[:3]}"
        )
    changed = {name: layer for name, layer in layers.items() if not _has(name, layer, wanted)}
    for name, layer in changed.items():
        _load(name, layer, model_config, wanted)
    if wrong := [line for name, layer in changed.items() for line in _describe_differences(name, layer, wanted)]:
        raise RuntimeError(f"vLLM holds other KV scales than were loaded: {', '.join(wrong[:5])}")
    return len(TENSORS) * len(changed)


def layers_by_name(model: torch.nn.Module) -> dict[str, Attention]:
    """Return vLLM's attention layers with an FP8 cache, by their names in a checkpoint:
    ``model.layers.0.self_attn``."""
    return {
        name.removesuffix(_ATTENTION): module
        for name, module in model.named_modules()
        if isinstance(module, Attention) and is_quantized_kv_cache(module.kv_cache_dtype)
    }


def held_scales(layer: torch.nn.Module) -> dict[str, list[float]]:
    """Return ``q``, ``k``, ``v`` → every copy of the scale that vLLM has in an attention layer."""
    return {x: kv_scale_copies(layer, x) for x in TENSORS}


def _load(name: str, layer: torch.nn.Module, model_config: ModelConfig, wanted: Mapping[str, torch.Tensor]) -> None:
    """Load the scales of one layer, like a reload of the whole model does, without looking for other weights."""
    initialize_layerwise_reload(layer)
    for x in TENSORS:
        parameter = getattr(layer, f"{x}_scale", None)
        if parameter is None:  # its quantization configuration gives attention no method
            raise RuntimeError(f"{name}: this engine cannot load KV scales, and the version has some")
        parameter.weight_loader(parameter, wanted[f"{name}.{x}_scale"])
    finalize_layerwise_reload(layer, model_config)


def _has(name: str, layer: torch.nn.Module, wanted: Mapping[str, torch.Tensor]) -> bool:
    """Compare the Python floats, which needs no synchronization with the device."""
    return all(kv_scale(layer, x) == wanted[f"{name}.{x}_scale"].item() for x in TENSORS)


def _describe_differences(name: str, layer: torch.nn.Module, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Describe the scales that differ from ``wanted``."""
    return [
        f"{name}.{x}_scale is {copies}, not {wanted[f'{name}.{x}_scale'].item()}"
        for x, copies in held_scales(layer).items()
        if any(copy != wanted[f"{name}.{x}_scale"].item() for copy in copies)
    ]
