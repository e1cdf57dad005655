"""Measures q, k and v of a live model where the KV cache sees them, in a forward pass of its own.

The pass runs beside the engine's requests, in the worker, while the engine is paused: eagerly, since compiled code
passes hooks by, and without KV cache and scheduler. Attention is computed here, from q, k and v before any rounding, in
hooks on vLLM's attention layers, whose own answer without a cache is empty. So what is measured does not depend on the
scales that the engine has, and is what a trainer sees in its forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rollout_service.kv_scales.apply import held_scales, layers_by_name
from rollout_service.kv_scales.fp8_error import ErrorSums, masked_amax
from rollout_service.kv_scales.measurement import KVMeasurement
from rollout_service.kv_scales.scales import TENSORS, LayerScales
from rollout_service.vllm_internals import Attention, set_forward_context

MOST_TOKENS = 2048
"""Of one pass, padding included, or as many as a step of the engine may have: memory for more was not set aside."""


def measure_kv(
    model: torch.nn.Module,
    vllm_config: Any,
    device: torch.device,
    sequences: Sequence[Sequence[int]],
    scales: Mapping[str, float] | None = None,
) -> KVMeasurement:
    """Run ``sequences`` of token ids through the model; every few of them are a forward pass.

    Args:
        scales: against which errors are measured, by ``<layer>.{q,k,v}_scale``; None: those that the engine has.

    Raises RuntimeError for attention that cannot be computed here (with the reason), or without any sequence.
    """
    layers = layers_by_name(model)
    if not layers or not sequences:
        raise RuntimeError(f"nothing to measure: {len(layers)} layers with an FP8 cache, {len(sequences)} sequences")
    for name, layer in layers.items():
        _require_computable(name, layer, vllm_config)
    watches = {name: _Watch(layer, _against(name, layer, scales)) for name, layer in layers.items()}
    limit = min(MOST_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens)
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
    """A forward hook of one attention layer: looks at its arguments, and puts attention in the place of its answer."""

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
        """Of each pass."""
        return tuple((q, k, v) for q, k, v in torch.stack(self._passes).double().tolist())

    def _mask(self) -> torch.Tensor | None:
        """Where a sliding window lets a position look; padding stands at the end, where nobody looks."""
        if self._window is None:
            return None
        tokens = self.counts.shape[1]
        ones = torch.ones(tokens, tokens, dtype=torch.bool, device=self.counts.device)
        return ones.tril() & ones.triu(1 - self._window)


def _forward(
    model: torch.nn.Module,
    vllm_config: Any,
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
    with set_forward_context(None, vllm_config, num_tokens=ids.numel(), skip_compiled=True):
        model(input_ids=ids.flatten(), positions=positions.flatten())


def _batches(sequences: Sequence[Sequence[int]], limit: int) -> Iterator[list[Sequence[int]]]:
    """Rows of like length, longest first, so many that with padding they are at most ``limit`` tokens; one at least."""
    ordered = sorted(sequences, key=len, reverse=True)
    while ordered:
        count = max(1, limit // len(ordered[0]))
        yield ordered[:count]
        ordered = ordered[count:]


def _against(name: str, layer: Attention, scales: Mapping[str, float] | None) -> LayerScales:
    if scales is None:
        return LayerScales(**{x: copies[0] for x, copies in held_scales(layer).items()})
    return LayerScales(**{x: scales[f"{name}.{x}_scale"] for x in TENSORS})


def _require_computable(name: str, layer: Attention, vllm_config: Any) -> None:
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
        raise RuntimeError(f"q, k and v of {name} cannot be measured: its attention has {', '.join(found)}")
