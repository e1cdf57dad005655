"""Round in a trainer at the same places as vLLM, so that the same weights give the same logprobs.

    with engine_roundings(model, client.recipe()):
        loss = …

Between a layer's matrix products, vLLM rounds to the model's dtype less often than transformers. The places differ
between a CPU, CUDA kernels (``engine.enforce_eager``) and torch.compile (a GPU without that setting). The table is of
vLLM 0.32; *quantized* is a compiled engine's step whose result becomes FP8 in the same kernel:

    step                        cpu       cuda_eager   cuda_compiled   quantized
    sum before a norm           fp32      rounded      fp32            fp32
    RMSNorm: rounds             twice     once         once            twice
    residual after attention    rounded   rounded      fp32            rounded
    QK-norm: rounds             twice     once         never           never
    rotation: rounds            once      once         once            once
    SwiGLU: rounds              twice     twice        once            never

- A norm that rounds twice rounds before and after it multiplies with its weight.
- The residual after the MLP is always rounded. The one after attention is rounded if a quantizing kernel writes it, or
  reads it in the next layer.
- Sums with a bias are rounded; not those of keys if the norm before quantizes: their rotation adds the bias itself.
- Sines and cosines are rounded; the rotation multiplies and adds in fp32.
- The weights of chosen experts are rounded on a CPU only.
- A mixture's norm, experts and shared expert quantize in kernels of their own.
- With adapters in the model or the recipe, nothing is quantized in the kernel before: adapters read the same input.
- Attention of a CPU engine computes in fp32 from rounded queries, keys and values to a rounded result (on processors
  without AMX). Otherwise the trainer's own attention is used, with rounded queries and keys.

Engines of both CUDA kinds differ from this only in the last bits of sums, of attention and of experts. Gradients are
those of the computation as it is. A model in fp32 is unchanged: nothing is rounded.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from threading import Lock
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from rollout_service.compat.transformers_internals import (
    AttentionFunction,
    attention_kernel,
    eager_attention,
    is_silu,
    registered_attention,
)
from rollout_service.protocol.upload import Kernels, TrainerRecipe
from rollout_service.quant.forwards import Forward, Forwards, adapter_forwards

logger = logging.getLogger(__name__)

KNOWN_LAYERS = frozenset(
    f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
)
"""Classes of transformers whose forward pass is known: RMSNorm, attention, sum, RMSNorm, MLP, sum."""
Fused = Literal["norm", "activation"]
"""The step in whose kernel a compiled engine quantizes the input of a linear layer."""
_FUSED_EPSILONS = (1e-5, 1e-6)
"""Epsilons of the RMSNorms that vLLM fuses with the quantization (its ``RMSNormQuantFusionPass``)."""
_Rounds = Literal["never", "once", "twice"]


class EngineRoundings(Forwards):
    """A model that rounds like the engines."""

    def __init__(
        self,
        forwards: Mapping[nn.Module, Forward],
        kernel: str,
        attention: Collection[nn.Module],
        fused: Mapping[nn.Module, Fused],
    ) -> None:
        super().__init__(forwards)
        self.fused = fused
        """Linear layers whose inputs the engine quantizes in the kernel of the step before. The step before
        ``activation`` returns fp32."""
        self._kernel, self._attention = kernel, attention
        _attention.enter(kernel, attention)

    def remove(self) -> None:
        """Restore the model's own computation, as ``Forwards.remove`` does."""
        super().remove()
        if self._attention:
            _attention.leave(self._kernel, self._attention)
            self._attention = ()


def refuse_fp8_cache(recipe: TrainerRecipe | None) -> None:
    """Raise ValueError if the engines' KV cache is FP8, which no trainer imitates."""
    if recipe is not None and recipe.kv_cache == "fp8_e4m3":
        raise ValueError(
            "the engines' KV cache is FP8, which is not imitated, and most of the mismatch would remain: set "
            "kv_cache.dtype: bfloat16, or train without fake_quant and engine_roundings"
        )


def kernels_of(model: nn.Module, recipe: TrainerRecipe | None = None) -> Kernels:
    """Return the kernels of the engines of the service with that recipe.

    None, or a recipe without them: those of a default engine on the device of the model's first parameter.
    """
    if recipe is not None and recipe.kernels is not None:
        return recipe.kernels
    if next(model.parameters()).device.type == "cpu":
        return "cpu"
    if recipe is not None:
        logger.warning(
            "the service does not say where its engines round, as with a compilation_config or environment of its own: "
            "the trainer rounds like vLLM's defaults, and its logprobs may be further from the engines'; give kernels"
        )
    return "cuda_compiled"


def engine_roundings(
    model: nn.Module,
    recipe: TrainerRecipe | None = None,
    *,
    kernels: Kernels | None = None,
    quantized: Collection[nn.Module] = (),
) -> EngineRoundings:
    """Make a transformers causal language model round at the same places as vLLM, from now on.

    Args:
        model: the whole model, or PEFT's model of it, whose adapters compute as ``adapter_forwards`` says.
        recipe: ``client.recipe()``, which names the engines' kernels; None: as ``kernels_of``.
        kernels: the engines' kernels, instead of those that the recipe names.
        quantized: linear layers whose inputs the caller quantizes, as ``fake_quant`` does.

    The hidden state between decoder layers is the sum in fp32, four bytes a channel instead of two, which gradient
    checkpointing also stores. FSDP2 rounds it, which loses a part of the gain, unless its ``MixedPrecisionPolicy`` has
    ``cast_forward_inputs=False``. With gradient checkpointing, call ``remove()`` after the backward pass.

    Raises ValueError for a model whose decoder layers are not all of ``KNOWN_LAYERS``, for engines with an FP8 KV
    cache, and for adapters that the service refuses.
    """
    refuse_fp8_cache(recipe)
    kernels = kernels or kernels_of(model, recipe)
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
    adapters, fused = adapter_forwards(model), dict[nn.Module, Fused]()
    quantizes_apart = bool(adapters) or (recipe is not None and recipe.adapters)
    for layer in layers if kernels == "cuda_compiled" and not quantizes_apart else ():
        fused |= _fused_quantization(layer, quantized)
    forwards: dict[nn.Module, Forward] = adapters | {
        backbone.rotary_emb: _rotary_forward(backbone.rotary_emb),
        backbone.norm: _norm_forward(backbone.norm, kernels, fuses=False),
    }
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        first, second = layer.self_attn.q_proj in fused, getattr(layer.mlp, "gate_proj", None) in fused
        is_written = second or (following is not None and following.self_attn.q_proj in fused)
        forwards |= {
            layer: _layer_forward(layer, rounds_residual=kernels != "cuda_compiled" or is_written),
            layer.input_layernorm: _norm_forward(layer.input_layernorm, kernels, fuses=first),
            layer.post_attention_layernorm: _norm_forward(layer.post_attention_layernorm, kernels, fuses=second),
        }
        if kernels != "cpu":
            forwards |= _forwards_on_a_gpu(layer, kernels, fused)
    return EngineRoundings(forwards, attention_kernel(inner), [layer.self_attn for layer in layers], fused)


def _fused_quantization(layer: Any, quantized: Collection[nn.Module]) -> dict[nn.Module, Fused]:
    """Return the linear layers of a decoder layer whose inputs a compiled engine quantizes in the kernel of the step
    before, and that step."""
    fused: dict[nn.Module, Fused] = {}
    for norm, block, names in (
        (layer.input_layernorm, layer.self_attn, ("q_proj", "k_proj", "v_proj")),
        (layer.post_attention_layernorm, layer.mlp, ("gate_proj", "up_proj")),  # a mixture's router reads it too
    ):
        linears = [getattr(block, name, None) for name in names]
        if norm.variance_epsilon in _FUSED_EPSILONS and all(each in quantized for each in linears):
            fused |= {each: "norm" for each in linears if each is not None}
    down: nn.Module | None = getattr(layer.mlp, "down_proj", None)
    if down is not None and down in quantized and is_silu(layer.mlp.act_fn):
        fused[down] = "activation"
    return fused


def _is_known(layer: nn.Module) -> bool:
    # check all base classes: FSDP2 inserts a class of its own with another name
    return any(cls.__name__ in KNOWN_LAYERS for cls in type(layer).__mro__)


def result_dtype(like: torch.Tensor) -> torch.dtype:
    """Return the dtype to which results are rounded: that of autocast, or of a parameter or input."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def _rotary_forward(rotary: nn.Module) -> Forward:
    own = rotary.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # in fp32, so that products with them are: ``_rounding_attention`` rounds the rotated queries and keys
        cos, sin = own(hidden, *args, **kwargs)
        return cos.to(result_dtype(hidden)).float(), sin.to(result_dtype(hidden)).float()

    return forward


def _norm_forward(norm: Any, kernels: Kernels, *, fuses: bool) -> Forward:
    """Return the forward pass of a norm of hidden states. ``fuses``: its kernel also quantizes."""
    rounds: _Rounds = "twice" if kernels == "cpu" or fuses else "once"
    return _rms_norm(norm, rounds, rounds_input=kernels == "cuda_eager")


def _rms_norm(norm: Any, rounds: _Rounds, *, rounds_input: bool) -> Forward:
    def forward(summed: torch.Tensor) -> torch.Tensor:
        rounded = result_dtype(norm.weight)
        if rounds_input:
            summed = summed.to(rounded)
        summed = summed.float()
        normalized = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        weight: torch.Tensor = norm.weight.to(rounded)
        if rounds == "twice":
            return weight * normalized.to(rounded)
        made = weight.float() * normalized
        return made.to(rounded) if rounds == "once" else made

    return forward


def _forwards_on_a_gpu(layer: Any, kernels: Kernels, fused: Mapping[nn.Module, Fused]) -> dict[nn.Module, Forward]:
    """Return the forward passes of the layer's QK-norm, dense MLP and router, as far as it has them."""
    forwards: dict[nn.Module, Forward] = {}
    norm: Any
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(layer.self_attn, name, None)) is not None:
            # compiled, the norm and the rotation are one kernel: ``_rounding_attention`` rounds its result
            rounds: _Rounds = "never" if kernels == "cuda_compiled" else "once"
            forwards[norm] = _rms_norm(norm, rounds, rounds_input=False)
    router: Any = getattr(layer.mlp, "gate", None)
    if hasattr(router, "norm_topk_prob"):
        forwards[router] = _router_forward(router)
    if kernels == "cuda_compiled":
        mlp: Any
        for mlp in (layer.mlp, getattr(layer.mlp, "shared_expert", None)):
            if hasattr(mlp, "gate_proj"):
                forwards[mlp] = _mlp_forward(mlp, quantizes=mlp.down_proj in fused)
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


def _mlp_forward(mlp: Any, *, quantizes: bool) -> Forward:
    """Return the forward pass of a compiled SwiGLU. ``quantizes``: its kernel also quantizes, from fp32."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rounded = result_dtype(mlp.gate_proj.weight)
        gate, up = (layer(hidden).to(rounded).float() for layer in (mlp.gate_proj, mlp.up_proj))
        gated = silu_and_mul(gate, up) if quantizes else (mlp.act_fn(gate) * up).to(rounded)
        made: torch.Tensor = mlp.down_proj(gated)
        return made

    return forward


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` by the formula of vLLM's kernels that also quantize: torch's SiLU may differ in the
    last bit."""
    return gate * torch.sigmoid(gate) * up


def _layer_forward(layer: Any, *, rounds_residual: bool) -> Forward:
    """Return the forward pass of a decoder layer. ``rounds_residual``: round the one between attention and MLP."""

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        rounded = result_dtype(layer.input_layernorm.weight)
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        summed = hidden_states.to(rounded).float() + attended.float()
        fed = layer.mlp(layer.post_attention_layernorm(summed))
        made: torch.Tensor = (summed.to(rounded).float() if rounds_residual else summed) + fed.float()
        return made

    return forward


class _RoundingAttention:
    """Attention with rounded queries and keys, registered in transformers once for all models that use a kernel."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rounding: dict[str, Counter[nn.Module]] = {}
        """Kernel → attention modules that round, each with the number of ``engine_roundings`` calls."""
        self._registered: dict[str, ExitStack] = {}

    def enter(self, kernel: str, modules: Collection[nn.Module]) -> None:
        with self._lock:
            rounding = self._rounding.setdefault(kernel, Counter())
            if kernel not in self._registered:
                self._registered[kernel] = ExitStack()
                self._registered[kernel].enter_context(
                    registered_attention(kernel, lambda own: _rounding_attention(own, rounding))
                )
            rounding.update(modules)

    def leave(self, kernel: str, modules: Collection[nn.Module]) -> None:
        with self._lock:
            rounding = self._rounding[kernel]
            rounding -= Counter(modules)  # and not subtract, which would keep modules, with their weights, at count 0
            if not rounding:
                del self._rounding[kernel]
                self._registered.pop(kernel).close()


_attention = _RoundingAttention()


def _rounding_attention(own: AttentionFunction | None, rounding: Mapping[nn.Module, int]) -> AttentionFunction:
    """Return ``own``, but for the modules in ``rounding``, round queries and keys first, which come in fp32."""

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attend = own or eager_attention(module)
        if not rounding.get(module):
            return attend(module, query, key, value, *args, **kwargs)
        rounded = result_dtype(module.o_proj.weight)
        query, key, value = query.to(rounded), key.to(rounded), value.to(rounded)
        if query.device.type != "cpu":
            return attend(module, query, key, value, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return output.to(rounded), weights

    return attention
