"""Compute like the engines in a trainer: FP8 weights and inputs in the forward pass, straight-through gradients.

    recipe = await client.recipe()
    with fake_quant(model, recipe):
        loss = …

Each layer that the service quantizes multiplies the same values as its engines: the weight's codes times their 128×128
scales, and the input's codes times its 1×128 scales. Between layers it rounds where the engines do
(``engine_roundings``), so that inputs have the same codes; the recipe says which kernels they have. The backward pass
treats both quantizations as the identity (straight-through estimator, Bengio et al., arXiv 1308.3432), with the
quantized weight and input, as in quantization-aware training. A layer saves the same tensors for the backward pass as
without this: input and weight, which are quantized again.
"""

import functools
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import linear

from rollout_service.compat.transformers_internals import is_silu
from rollout_service.protocol.experts import pieces
from rollout_service.protocol.upload import Kernels, TrainerRecipe
from rollout_service.quant.blockwise import BLOCK, CODES, E4M3_MAX, dequantize_blockwise
from rollout_service.quant.engine_roundings import (
    EngineRoundings,
    Fused,
    engine_roundings,
    kernels_of,
    refuse_fp8_cache,
    result_dtype,
    silu_and_mul,
)
from rollout_service.quant.forwards import Forward, Forwards, adapter_forwards
from rollout_service.quant.quantizer import Quantizer

logger = logging.getLogger(__name__)

_STACKED = {"gate_up_proj", "down_proj"}
_WRAPPERS = re.compile(
    r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|base_model\.model\.|base_layer\.|^module\."
)
"""Parts of a parameter's name that wrappers add."""
_GROUP_FLOOR = 1e-10
_FUSED_SCALE_FLOOR = 1 / (E4M3_MAX * 512)
"""Minimum scale of vLLM's kernels with fused quantization (its ``min_scaling_factor``)."""
_FIRST_WITH_FP8, _HOPPER = (8, 9), 9
"""CUDA's compute capability."""
Products = Literal["fp8", "bf16", "fp32"]
"""Arithmetic of products: on a GPU's FP8 tensor cores like engines, in the trainer's dtype, or in fp32."""


class FakeQuant(Forwards):
    """Layers of a model that compute in FP8."""

    def __init__(self, forwards: dict[nn.Module, Forward], roundings: EngineRoundings | None) -> None:
        super().__init__(forwards)
        self.layers = tuple(forwards)
        """Linear layers, modules that hold a layer's experts, and PEFT's layers with adapters."""
        self.roundings = roundings
        """The roundings of the engines; None: the model rounds as in transformers."""

    def remove(self) -> None:
        """Restore the layers' own computation, as ``Forwards.remove`` does, and then their roundings."""
        super().remove()
        if self.roundings is not None:
            self.roundings.remove()


def fake_quant(
    model: nn.Module,
    recipe: TrainerRecipe,
    *,
    roundings: bool = True,
    kernels: Kernels | None = None,
    products: Products | None = None,
) -> FakeQuant:
    """Make a transformers ``model`` compute like the engines of the service with that ``recipe``, from now on.

    Args:
        model: a whole model in BF16 or fp32, or PEFT's model of it with LoRA, see ``adapter_forwards``. FSDP may wrap
            its layers; tensor parallelism may not shard them.
        recipe: ``client.recipe()``.
        roundings: also apply ``engine_roundings``, with its conditions. A model without known roundings keeps its own,
            with a warning.
        kernels: the engines' kernels; None: those that the recipe names, see ``kernels_of``.
        products: arithmetic of products. None: the nearest to the engines: ``fp32`` on the CPU or for CPU engines,
            ``fp8`` on a Hopper, and ``bf16`` on other GPUs. ``fp8``, a Triton kernel (``fp8_product.py``), accumulates
            like the engines' kernels: a Hopper's tensor cores keep about 14 bits of a sum, so that not even fp32 has
            the same results. ``bf16``, the dtype of autocast or else of the weight, rounds each scaled code once more.

    A layer's result has the dtype of autocast or else of its weight, but fp32 where a compiled engine does not round.
    The model's parameters do not change.

    Raises ValueError if the service quantizes nothing, uses another format than FP8 blocks, quantizes a weight that
    ``model`` does not have, or only a part of a layer; for engines with an FP8 KV cache; for adapters that the
    service refuses; for ``fp8`` if the model is not on a GPU that supports it.
    """
    if recipe.weights == "none":
        raise ValueError("the service quantizes nothing (quant.weights is none): train without fake_quant")
    if recipe.weights != "fp8_block":
        raise ValueError(
            f"the service quantizes to {recipe.weights}, and fake_quant supports fp8_block only: train without "
            "fake_quant, or set quant.weights: fp8_block"
        )
    refuse_fp8_cache(recipe)
    held = _quantized_parameters(model, recipe)
    quantizer = Quantizer(power_of_two=recipe.scales == "power_of_two")
    kernels = kernels or kernels_of(model, recipe)
    arithmetic = _Arithmetic(quantizer, kernels, _products_of(model, kernels, products))
    modules = {name: model.get_submodule(name) for name in held}
    with ExitStack() as undone:
        rounding: EngineRoundings | None = None
        if roundings:
            try:
                rounding = engine_roundings(model, recipe, kernels=kernels, quantized=set(modules.values()))
                undone.callback(rounding.remove)
            except ValueError as error:
                logger.warning("%s: the trainer's logprobs will be further from the engines'", error)
        fused = {} if rounding is None else rounding.fused
        forwards = adapter_forwards(model) if rounding is None else {}
        for name, module in modules.items():
            forwards[module] = _forward_of(module, name, held[name], arithmetic, fused.get(module))
        undone.pop_all()
    return FakeQuant(forwards, rounding)


def _quantized_parameters(model: nn.Module, recipe: TrainerRecipe) -> dict[str, set[str]]:
    """Return module → names of its parameters that the service quantizes. Raises ValueError, as ``fake_quant``
    does."""
    held: dict[str, set[str]] = {}
    missing = set(recipe.quantized)
    for name, parameter in model.named_parameters():
        stored = [piece.name for piece in pieces(_WRAPPERS.sub("", name), tuple(parameter.shape), recipe.experts)]
        here = missing.intersection(stored)
        if 0 < len(here) < len(stored):
            raise ValueError(
                f"{name}: the service quantizes {len(here)} of its {len(stored)} matrices: all or none must be"
            )
        if here:
            missing -= here
            place, _, leaf = name.rpartition(".")
            held.setdefault(place, set()).add(leaf)
    if missing:
        raise ValueError(
            f"the service quantizes {len(missing)} weights that this model has not, such as {min(missing)}: give the "
            "whole transformers model that it serves"
        )
    return held


@dataclass(frozen=True)
class _Kernel:
    """Properties of the kernels that multiply."""

    scales_in_turn: bool = False
    """See ``fp8_product.scaled_product``."""
    fused: Fused | None = None
    """See ``group_codes``."""
    rounds_result: bool = True


_OF_EXPERTS = _Kernel(scales_in_turn=True)
_SECOND_OF_EXPERTS = _Kernel(scales_in_turn=True, fused="activation", rounds_result=False)
"""Second product of experts on a GPU: it quantizes the activation's result, and multiplies the product with the
expert's weight."""


@dataclass(frozen=True)
class _Arithmetic:
    quantizer: Quantizer
    kernels: Kernels
    products: Products


def _products_of(model: nn.Module, kernels: Kernels, wanted: Products | None) -> Products:
    """Return ``wanted``, or the arithmetic nearest to the engines on the device of the model's first parameter."""
    device = next(model.parameters()).device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if wanted == "fp8" and capability < _FIRST_WITH_FP8:
        raise ValueError(
            f"products are to be computed in fp8, but the model is on {device}, which cannot: give fp32 or bf16, or "
            "move it first to a GPU of Ada's or Hopper's generation or a later one"
        )
    if wanted is not None:
        return wanted
    if device.type == "cpu" or kernels == "cpu":
        return "fp32"
    return "fp8" if capability[0] == _HOPPER else "bf16"


def _forward_of(module: nn.Module, name: str, held: set[str], arithmetic: _Arithmetic, fused: Fused | None) -> Forward:
    if isinstance(module, nn.Linear) and held == {"weight"}:
        # compiled, one kernel adds the bias of keys and rotates them, another stores the sums for queries and values
        return _linear_forward(module, arithmetic, fused, keeps_sum=fused == "norm" and name.endswith(".k_proj"))
    if held == _STACKED and callable(getattr(module, "act_fn", None)):
        return _experts_forward(module, arithmetic)
    raise ValueError(
        f"{name} is a {type(module).__name__} with {', '.join(sorted(held))} in FP8. Known here are Linear layers, and "
        f"experts with {' and '.join(sorted(_STACKED))}, act_fn between them"
    )


def _linear_forward(
    module: nn.Linear, arithmetic: _Arithmetic, fused: Fused | None, *, keeps_sum: bool = False
) -> Forward:
    kernel = _Kernel(fused=fused)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        made = _product(hidden, module.weight, arithmetic, kernel)
        rounded = result_dtype(module.weight)
        if arithmetic.kernels != "cpu":
            made = made.to(rounded)  # vLLM adds the bias to the rounded result of CUTLASS
        if module.bias is not None:
            made = made.float() + module.bias.to(rounded).float()
            if keeps_sum:
                return made
        return made.to(rounded)

    return forward


def _experts_forward(module: Any, arithmetic: _Arithmetic) -> Forward:
    on_cpu = arithmetic.kernels == "cpu"

    def forward(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        # unbind once: the gradient of each indexed expert would be as large as all of them
        gates_ups, downs = module.gate_up_proj.unbind(), module.down_proj.unbind()
        rounded = result_dtype(hidden)
        if on_cpu:  # vLLM's router for the CPU rounds them, its kernel for CUDA does not
            top_k_weights = top_k_weights.to(rounded)
        places, made = [hidden.new_zeros(0, dtype=torch.int64)], [hidden.new_zeros(0, hidden.shape[1]).float()]
        for expert, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            if len(token):
                both = _product(hidden[token], gate_up, arithmetic, _OF_EXPERTS).to(rounded).float()
                gate, up = both.chunk(2, dim=-1)
                if on_cpu:  # ``CpuBlockMoEMethod``
                    gated = (module.act_fn(gate) * up).to(rounded)
                    output = _product(gated, down, arithmetic, _OF_EXPERTS).float()
                else:
                    gated = _gate_on_gpu(module.act_fn, gate, up, rounded)
                    output = _product(gated, down, arithmetic, _SECOND_OF_EXPERTS)
                output = output * top_k_weights[token, place, None]
                made.append(output if on_cpu else output.to(rounded).float())
                places.append(token * top_k_index.shape[1] + place)
        of_places = hidden.new_zeros(top_k_index.numel(), hidden.shape[1], dtype=torch.float32)
        of_places = of_places.index_copy(0, torch.cat(places), torch.cat(made)).unflatten(0, top_k_index.shape)
        if on_cpu:  # the CPU sums in the order of experts' numbers, a GPU in the router's order
            by_number = top_k_index.argsort(dim=1)[:, :, None].expand_as(of_places)
            of_places = of_places.gather(1, by_number)
        summed: torch.Tensor = functools.reduce(torch.add, of_places.unbind(1))
        return summed.to(hidden.dtype)

    return forward


def _gate_on_gpu(activation: nn.Module, gate: torch.Tensor, up: torch.Tensor, rounded: torch.dtype) -> torch.Tensor:
    """Return the gated activation of vLLM's experts, in fp32. Only SiLU is fused with the quantization."""
    if is_silu(activation):
        return silu_and_mul(gate, up)
    gated: torch.Tensor = (activation(gate).to(rounded) * up).to(rounded).float()
    return gated


class _Product(torch.autograd.Function):
    """``input @ weightᵀ`` of the quantized input [..., K] and weight [N, K]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, arithmetic: _Arithmetic, kernel: _Kernel
    ) -> torch.Tensor:
        ctx.quantizer, ctx.kernel = arithmetic.quantizer, kernel
        ctx.computed = torch.float32 if arithmetic.products == "fp32" else result_dtype(weight)
        ctx.save_for_backward(hidden, weight)
        if arithmetic.products == "fp8":
            return _in_fp8(hidden, weight, arithmetic.quantizer, ctx.computed, kernel)
        with torch.autocast(hidden.device.type, enabled=False):
            inputs = through_groups(hidden, fused=kernel.fused)
            weights = _through_blocks(weight, ctx.quantizer)
            return linear(inputs.to(ctx.computed), weights.to(ctx.computed))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(ctx.computed)
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (gradient @ _through_blocks(weight, ctx.quantizer).to(ctx.computed)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            inputs = through_groups(hidden, fused=ctx.kernel.fused).to(ctx.computed)
            of_weight = (gradient.flatten(0, -2).T @ inputs.flatten(0, -2)).to(weight.dtype)
        return of_hidden, of_weight, None, None


_product: Callable[..., torch.Tensor] = _Product.apply


def _in_fp8(
    hidden: torch.Tensor, weight: torch.Tensor, quantizer: Quantizer, computed: torch.dtype, kernel: _Kernel
) -> torch.Tensor:
    # imported here: a trainer on the CPU may not have Triton
    from rollout_service.quant.fp8_product import scaled_product

    inputs, input_scales = group_codes(hidden.flatten(0, -2), fused=kernel.fused)
    [(codes, scales)] = quantizer.quantize([("weight", weight.detach())])
    made = computed if kernel.rounds_result else torch.float32
    product = scaled_product(inputs, input_scales, codes, scales, dtype=made, scales_in_turn=kernel.scales_in_turn)
    return product.view(*hidden.shape[:-1], len(weight))


def group_codes(hidden: torch.Tensor, *, fused: Fused | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a layer's input [..., K] like an engine: E4M3 of that shape, and scales fp32 [..., K / 128].

    Groups are 1×128, codes are ``x / s``. None: BF16 inputs with ``s = max(max|x|, 1e-10) / 448`` in fp32, like vLLM's
    ``per_token_group_quant_fp8``. ``fused``: the step whose kernel also quantizes. Then ``s = max(max|x| / 448, 1 /
    (448 · 512))``; inputs are BF16 after a norm, like ``rms_norm_per_block_quant``, and fp32 after an activation, like
    ``silu_and_mul_per_block_quant``. Raises RuntimeError if K is not a multiple of 128.
    """
    groups = (hidden if fused == "activation" else hidden.to(torch.bfloat16)).float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True)
    if fused is None:
        largest = largest.clamp(min=_GROUP_FLOOR)
    scales = largest / torch.full_like(largest, E4M3_MAX)  # divided, as in ``block_scales``
    if fused is not None:
        scales = scales.clamp(min=_FUSED_SCALE_FLOOR)
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(CODES)
    return codes.flatten(-2), scales[..., 0]


def through_groups(hidden: torch.Tensor, *, fused: Fused | None = None) -> torch.Tensor:
    """Return the input after a round trip through ``group_codes``; fp32 [..., K]."""
    codes, scales = group_codes(hidden, fused=fused)
    decoded: torch.Tensor = codes.float().unflatten(-1, (-1, BLOCK)) * scales[..., None]
    return decoded.flatten(-2)


def _through_blocks(weight: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    [(codes, scales)] = quantizer.quantize([("weight", weight.detach())])
    return dequantize_blockwise(codes, scales)
