"""Round in a trainer at the same places as vLLM, so that the same weights give the same logprobs.

    with engine_roundings(model):
        loss = …

Between a layer's matrix products, vLLM rounds to the model's dtype less often than transformers. The places differ
between a CPU, CUDA kernels (``engine.enforce_eager``) and torch.compile (a GPU without that setting):

- rotary embedding: sines and cosines are rounded, the rotation is in fp32, and its result is rounded;
- RMSNorm after a residual sum: compiled, and on the CPU, of the sum before rounding; CUDA's ``fused_add_rms_norm``
  rounds it first. The residual that is passed on is the rounded sum;
- RMSNorm's weight: on a GPU it multiplies the unrounded value, also for QK-norm;
- SwiGLU of dense layers: compiled, one rounding instead of two;
- the weights of chosen experts: not rounded on a GPU;
- attention of a CPU engine: in fp32 from rounded queries, keys and values to a rounded result (on processors without
  AMX). Otherwise the trainer's own attention is used, with rounded queries and keys.

These facts are from vLLM 0.32. They were compared with engines on a GPU. With CUDA kernels, the results agree except
for the last bits of attention and experts; compiled ones do not agree yet (docs/numerics.md, "On a GPU"). Gradients are
of the computation as it is. A model in fp32 is unchanged: nothing is rounded.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from threading import Lock
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from rollout_service.compat.transformers_internals import (
    AttentionFunction,
    attention_kernel,
    eager_attention,
    registered_attention,
)
from rollout_service.quant.forwards import Forward, Forwards

KNOWN_LAYERS = frozenset(
    f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
)
"""Classes of transformers whose forward pass is known: RMSNorm, attention, sum, RMSNorm, MLP, sum."""
Kernels = Literal["cpu", "cuda_eager", "cuda_compiled"]
"""Kinds of an engine's kernels between its matrix products."""


class EngineRoundings:
    """A model that rounds like the engines, until ``remove()`` or the end of a ``with`` block."""

    def __init__(self, forwards: Forwards, kernel: str, attention: Collection[nn.Module]) -> None:
        self._forwards, self._kernel, self._attention = forwards, kernel, attention
        _attention.enter(kernel, attention)

    def remove(self) -> None:
        """Restore the model's own computation; may be called again. Raises RuntimeError as ``Forwards.remove`` does."""
        self._forwards.remove()
        if self._attention:
            _attention.leave(self._kernel, self._attention)
            self._attention = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def kernels_of(model: nn.Module) -> Kernels:
    """Return the kernels of a default engine on the device of the model's first parameter."""
    return "cpu" if next(model.parameters()).device.type == "cpu" else "cuda_compiled"


def engine_roundings(model: nn.Module, kernels: Kernels | None = None) -> EngineRoundings:
    """Make a transformers causal language model round at the same places as vLLM, from now on.

    ``kernels``: the engine's; None: those of a default engine on the model's kind of device, ``kernels_of``.

    The hidden state between decoder layers is the sum in fp32, four bytes a channel instead of two, which gradient
    checkpointing also stores. FSDP2 rounds it, which loses a part of the gain, unless its ``MixedPrecisionPolicy`` has
    ``cast_forward_inputs=False``. With gradient checkpointing, call ``remove()`` after the backward pass.

    Raises ValueError for a model whose decoder layers are not all of ``KNOWN_LAYERS``.
    """
    kernels = kernels or kernels_of(model)
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(f"{type(model).__name__} holds no transformers model")
    backbone: Any = inner.base_model
    layers = list(getattr(backbone, "layers", ()))
    unknown = sorted({type(layer).__name__ for layer in layers if not _is_known(layer)})
    if not layers or unknown:
        raise ValueError(
            f"unknown roundings of vLLM for {', '.join(unknown) or type(backbone).__name__}: known are "
            f"{', '.join(sorted(KNOWN_LAYERS))}; train without engine_roundings"
        )
    forwards: dict[nn.Module, Forward] = {
        backbone.rotary_emb: _rotary_forward(backbone.rotary_emb),
        backbone.norm: _norm_forward(backbone.norm, kernels),
    }
    for layer in layers:
        forwards[layer] = _layer_forward(layer)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            forwards[norm] = _norm_forward(norm, kernels)
        if kernels != "cpu":
            forwards |= _forwards_on_a_gpu(layer, kernels)
    return EngineRoundings(Forwards(forwards), attention_kernel(inner), [layer.self_attn for layer in layers])


def _is_known(layer: nn.Module) -> bool:
    # check all base classes: FSDP2 inserts a class of its own with another name
    return any(cls.__name__ in KNOWN_LAYERS for cls in type(layer).__mro__)


def _result_dtype(like: torch.Tensor) -> torch.dtype:
    """Return the dtype to which results are rounded: that of autocast, or of a parameter or input."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def _rotary_forward(rotary: nn.Module) -> Forward:
    own = rotary.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # in fp32, so that products with them are: ``_rounding_attention`` rounds the rotated queries and keys
        cos, sin = own(hidden, *args, **kwargs)
        return cos.to(_result_dtype(hidden)).float(), sin.to(_result_dtype(hidden)).float()

    return forward


def _norm_forward(norm: Any, kernels: Kernels) -> Forward:
    def forward(summed: torch.Tensor) -> torch.Tensor:
        rounded = _result_dtype(norm.weight)
        if kernels == "cuda_eager":
            summed = summed.to(rounded)
        summed = summed.float()
        normalized = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        made: torch.Tensor
        if kernels == "cpu":
            made = norm.weight.to(rounded) * normalized.to(rounded)
        else:
            made = (norm.weight.to(rounded).float() * normalized).to(rounded)
        return made

    return forward


def _forwards_on_a_gpu(layer: Any, kernels: Kernels) -> dict[nn.Module, Forward]:
    """Return the forward passes of the layer's QK-norm, dense MLP and router, as far as it has them."""
    forwards: dict[nn.Module, Forward] = {}
    norm: Any
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(layer.self_attn, name, None)) is not None:
            forwards[norm] = _norm_forward(norm, kernels)
    router: Any = getattr(layer.mlp, "gate", None)
    if hasattr(router, "norm_topk_prob"):
        forwards[router] = _router_forward(router)
    if kernels == "cuda_compiled":
        mlp: Any
        for mlp in (layer.mlp, getattr(layer.mlp, "shared_expert", None)):
            if hasattr(mlp, "gate_proj"):
                forwards[mlp] = _mlp_forward(mlp)
    return forwards


def _router_forward(router: Any) -> Forward:
    own = router.forward

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, _, chosen = own(hidden)
        weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    return forward


def _mlp_forward(mlp: Any) -> Forward:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        gate, up = mlp.gate_proj(hidden), mlp.up_proj(hidden)
        made: torch.Tensor = mlp.down_proj((mlp.act_fn(gate.float()) * up.float()).to(gate.dtype))
        return made

    return forward


def _layer_forward(layer: Any) -> Forward:
    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        rounded = _result_dtype(layer.input_layernorm.weight)
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        summed = hidden_states.to(rounded).float() + attended.float()
        fed = layer.mlp(layer.post_attention_layernorm(summed))
        made: torch.Tensor = summed.to(rounded).float() + fed.float()
        return made

    return forward


class _RoundingAttention:
    """Attention with rounded queries and keys, registered in transformers once for all models that use a kernel."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._models: dict[str, Counter[nn.Module]] = {}
        """Kernel → attention modules that round, each with the number of ``engine_roundings`` calls."""
        self._registered: dict[str, ExitStack] = {}

    def enter(self, kernel: str, modules: Collection[nn.Module]) -> None:
        with self._lock:
            if kernel not in self._registered:
                rounding = self._models[kernel] = Counter()
                self._registered[kernel] = ExitStack()
                self._registered[kernel].enter_context(
                    registered_attention(kernel, lambda own: _rounding_attention(own, rounding))
                )
            self._models[kernel].update(modules)

    def leave(self, kernel: str, modules: Collection[nn.Module]) -> None:
        with self._lock:
            self._models[kernel].subtract(modules)
            if not any(self._models[kernel].values()):
                self._registered.pop(kernel).close()


_attention = _RoundingAttention()


def _rounding_attention(own: AttentionFunction | None, rounding: Mapping[nn.Module, int]) -> AttentionFunction:
    """Return ``own``, but for the modules in ``rounding``, round queries and keys first, which come in fp32."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attend = own or eager_attention(module)
        if attend is None:
            raise ValueError(f"{type(module).__name__} has no eager attention: load it with attn_implementation='sdpa'")
        if not rounding.get(module):
            return attend(module, query, key, value, *args, **kwargs)
        rounded = _result_dtype(module.o_proj.weight)
        query, key, value = query.to(rounded), key.to(rounded), value.to(rounded)
        if query.device.type != "cpu":
            return attend(module, query, key, value, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return output.to(rounded), weights

    return attention
