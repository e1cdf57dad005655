"""Measure q, k and v in a transformers model as a KV cache receives them: after QK-norm and rotary embedding.

It uses transformers' registry of attention functions (``AttentionInterface``), in which every attention layer looks up
its kernel at each call. No class of a model is changed, and the configured kernel still computes the result.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout_service.compat.transformers_internals import (
    AttentionFunction,
    attention_kernel,
    eager_attention,
    registered_attention,
)
from rollout_service.errors import InvalidRequest
from rollout_service.kv_scales.fp8_error import ErrorSums, masked_amax
from rollout_service.kv_scales.scales import Amax, KVScales, scales_from_amax
from rollout_service.protocol.kv_scales import LayerError

_Mine = TypeVar("_Mine")

_observing = Lock()
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
"""Module name prefixes of torch's wrappers."""


class Observation:
    """Measurements over the forward passes of a model. Created by ``observe_qkv``.

    Recomputation under gradient checkpointing happens outside the forward pass and is not counted again.
    """

    def __init__(self, model: PreTrainedModel, measured_with: KVScales | None) -> None:
        self.layers = attention_layers(model)
        """Attention module → its name in the checkpoint."""
        self._measured_with = measured_with
        self._errors: dict[str, ErrorSums] = {}
        self._passes: list[dict[str, torch.Tensor]] = []
        self._tokens: list[torch.Tensor] = []
        self._current: dict[str, torch.Tensor] | None = None
        self._mask: torch.Tensor | None = None
        self._counted: torch.Tensor | None = None
        if measured_with is not None:
            measured_with.require_layers(list(self.layers.values()))

    def amax(self) -> dict[str, Amax]:
        """Return layer → [num_micro_batches, 3] float64: the largest |q|, |k|, |v| of each pass, on this rank.

        Passes without an unmasked token are left out. Raises InvalidRequest if a pass did not call every layer.
        """
        passes = [seen for seen, tokens in zip(self._passes, self._tokens, strict=True) if int(tokens)]
        for seen in passes:
            if missing := [name for name in self.layers.values() if name not in seen]:
                raise InvalidRequest(
                    f"{len(missing)} attention layers did not call transformers' attention interface: {missing[:5]}",
                    {"layers": missing},
                )
        names = self.layers.values() if passes else ()
        return {
            name: np.asarray(torch.stack([seen[name] for seen in passes]).double().cpu(), np.float64) for name in names
        }

    @property
    def tokens(self) -> int:
        """Return the number of unmasked positions in this rank's passes."""
        return sum(int(tokens) for tokens in self._tokens)

    def scales(self, group: "torch.distributed.ProcessGroup | None" = None) -> KVScales:
        """Return the scales, equal on all ranks: a collective call if ``torch.distributed`` is initialized.

        ``group``: the ranks whose measurements are merged; None: all.

        Raises the InvalidRequests of ``scales_from_amax``, on every rank.
        """
        try:
            mine: dict[str, Amax] | InvalidRequest = self.amax()
        except InvalidRequest as error:
            mine = error  # raised after the collective call, since the other ranks would wait for this one
        every: list[dict[str, Amax]] = []
        for amax in _gather(mine, group):
            if isinstance(amax, InvalidRequest):
                raise amax
            every.append(amax)
        return scales_from_amax(every)

    def errors(self) -> dict[str, LayerError]:
        """Return layer → errors of FP8 with the given scales, on this rank. Raises InvalidRequest if none were
        given."""
        if self._measured_with is None:
            raise InvalidRequest("errors are measured against scales: observe_qkv(model, measured_with=scales)")
        return {name: sums.result() for name, sums in self._errors.items()}

    def begin(self, backbone: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Begin a pass; a forward pre-hook of the backbone."""
        mask = inspect.signature(backbone.forward).bind(*args, **kwargs).arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
            kind = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise InvalidRequest(
                f"attention_mask is {kind}: only a mask [batch, tokens] says which positions count. Pass that, or none"
            )
        self._mask, self._current = None if mask is None else mask.bool(), {}
        self._counted = None

    def end(self, *_: object) -> None:
        """Count a complete pass; a forward hook of the backbone."""
        if self._current is not None and self._counted is not None:
            self._passes.append(self._current)
            self._tokens.append(self._counted)
        self._current = None

    @torch.no_grad()
    def see(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
    ) -> None:
        """Count q [batch, num_heads, tokens, head_dim], k and v [batch, num_kv_heads, tokens, head_dim]."""
        name = self.layers.get(module)
        if name is None or self._current is None:
            return
        counts_q, counts_k = _unmasked(self._mask, q), _unmasked(self._mask, k)
        self._current[name] = torch.stack(
            [masked_amax(q, counts_q), masked_amax(k, counts_k), masked_amax(v, counts_k)],
        )
        self._counted = counts_q.sum()
        if self._measured_with is not None:
            if name not in self._errors:
                self._errors[name] = ErrorSums(self._measured_with.layers[name])
            scaling = scaling if scaling is not None else q.shape[-1] ** -0.5
            self._errors[name].add(q, k, v, counts_q, counts_k, scaling)


@contextmanager
def observe_qkv(model: torch.nn.Module, *, measured_with: KVScales | None = None) -> Iterator[Observation]:
    """Observe every forward pass of ``model`` within the context: training or not, any attention kernel, under FSDP2.

    Each call of the model is a micro-batch. Positions that a 2-D ``attention_mask`` masks do not count.

    Args:
        model: a transformers causal language model, or a module that contains one.
        measured_with: scales whose errors are measured in the same passes.

    Raises InvalidRequest without such a model, for latent attention, whose cache does not hold k and v, and during
    another observation.
    """
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise InvalidRequest(
            f"{type(model).__name__} holds no transformers model: give amax to scales_from_amax instead"
        )
    observation = Observation(inner, measured_with)
    if not _observing.acquire(blocking=False):
        raise InvalidRequest("another observation is active in this process: end it first")
    backbone = inner.base_model
    hooks = [
        backbone.register_forward_pre_hook(observation.begin, with_kwargs=True),
        backbone.register_forward_hook(observation.end),
    ]
    try:
        with registered_attention(
            attention_kernel(inner), lambda original: _observing_attention(original, observation.see)
        ):
            yield observation
    finally:
        for hook in hooks:
            hook.remove()
        _observing.release()


def attention_layers(model: PreTrainedModel) -> dict[torch.nn.Module, str]:
    """Return attention module → its name in the checkpoint, in the model's order. Raises InvalidRequest if there are
    none."""
    if getattr(model.config, "kv_lora_rank", None):
        raise InvalidRequest(f"{type(model).__name__} has latent attention (MLA): its cache holds no k and v to scale")
    prefix = f"{model.base_model_prefix}." if model.base_model is model else ""
    layers = {
        module: prefix + _WRAPPERS.sub("", name)
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj") and hasattr(module, "v_proj")
    }
    if not layers:
        raise InvalidRequest(f"{type(model).__name__} has no attention layers with k_proj and v_proj of their own")
    return layers


def _observing_attention(original: AttentionFunction | None, see: Callable[..., None]) -> AttentionFunction:
    """Return an attention function that passes the arguments of ``original`` to ``see``; None: the model's eager
    one."""

    def observed(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        scaling: float | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        see(module, query, key, value, scaling)
        attend = original or eager_attention(module)
        return attend(module, query, key, value, *args, scaling=scaling, **kwargs)

    return observed


def _unmasked(mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return the mask of unmasked positions of x [batch, heads, tokens, head_dim]: [batch, tokens] bool."""
    batch, _, tokens, _ = x.shape
    if mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=x.device)
    if mask.shape[0] != batch or mask.shape[1] < tokens:
        raise InvalidRequest(
            f"attention_mask {list(mask.shape)} does not cover {batch} rows of {tokens} tokens: a cache of fixed size "
            "cannot be observed"
        )
    return mask[:, -tokens:].to(x.device)


def _gather(mine: _Mine, group: "torch.distributed.ProcessGroup | None") -> list[_Mine]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [mine]
    ranks = [mine] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(ranks, mine, group)
    return ranks
