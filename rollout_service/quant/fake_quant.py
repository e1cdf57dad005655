"""A trainer that computes as the engines do: FP8 weights and inputs in the forward pass, gradients straight through.

    recipe = await client.recipe()
    with fake_quant(model, recipe):
        loss = …

Each layer that the service quantizes multiplies what its engines multiply: the weight's codes times their 128×128
scales, and the input's codes times its 1×128 scales; between the layers it rounds where they do (``engine_roundings``),
so that no input lands on another code than theirs. The backward pass takes both roundings for the identity
(straight-through estimator, Bengio et al., arXiv 1308.3432), with the rounded weight and input, as quantization-aware
training does. A layer keeps for it what it would keep without: the input and the weight, which are rounded again.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import linear

from rollout_service.protocol.experts import pieces
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.blockwise import BLOCK, CODES, E4M3_MAX, dequantize_blockwise
from rollout_service.quant.engine_roundings import EngineRoundings, Kernels, engine_roundings, kernels_of
from rollout_service.quant.forwards import Forward, Forwards
from rollout_service.quant.quantizer import Quantizer

logger = logging.getLogger(__name__)

_STACKED = {"gate_up_proj", "down_proj"}
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|^module\.")
_GROUP_FLOOR = 1e-10


class FakeQuant:
    """Layers of a model that compute in FP8 until ``remove()``, or the end of a ``with`` block."""

    def __init__(self, forwards: dict[nn.Module, Forward], roundings: EngineRoundings | None) -> None:
        self.layers = tuple(forwards)
        """Linear layers, and the modules that hold a layer's experts."""
        self.roundings = roundings
        """Where the model rounds as the engines do; None where it rounds as transformers does."""
        self._forwards = Forwards(forwards)

    def remove(self) -> None:
        """The layers compute as they did; again does no harm.

        Raises RuntimeError if one has got yet another forward since.
        """
        self._forwards.remove()
        if self.roundings is not None:
            self.roundings.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def fake_quant(
    model: nn.Module,
    recipe: TrainerRecipe,
    *,
    roundings: bool = True,
    kernels: Kernels | None = None,
    exact: bool = False,
) -> FakeQuant:
    """Have a transformers ``model`` compute as the engines of the service with that ``recipe``, from now on.

    Args:
        model: a whole one, BF16 or fp32. FSDP may wrap its layers; tensor parallelism may not cut them.
        recipe: ``client.recipe()``.
        roundings: those of ``engine_roundings`` as well, which has its conditions. A model of which they are not known
            keeps its own, and a warning says so.
        kernels: as for ``engine_roundings``.
        exact: products in fp32 on a GPU, too, as the engines' are but for the order of sums: many times slower there
            than in BF16, in which each factor is rounded again.

    Products and biases are computed in fp32 on the CPU, and elsewhere, if not ``exact``, in the dtype of autocast or
    else of the input; the result has that dtype. Nothing of the model's parameters changes.

    Raises ValueError if the service quantizes nothing, to another format than FP8, something that ``model`` has not, or
    a part of a layer.
    """
    if recipe.weights == "none":
        raise ValueError("the service quantizes nothing (quant.weights is none): a trainer computes as it does already")
    if recipe.weights != "fp8_block":
        raise ValueError(f"the service quantizes to {recipe.weights}, and fake_quant computes in fp8_block alone")
    held: dict[str, set[str]] = {}
    missing = set(recipe.quantized)
    for name, parameter in model.named_parameters():
        stored = [piece.name for piece in pieces(_own(name), tuple(parameter.shape), recipe.experts)]
        here = missing.intersection(stored)
        if 0 < len(here) < len(stored):
            raise ValueError(f"{name}: the service quantizes {len(here)} of its {len(stored)} matrices, and not all")
        if here:
            missing -= here
            place, _, leaf = name.rpartition(".")
            held.setdefault(place, set()).add(leaf)
    if missing:
        raise ValueError(
            f"the service quantizes {len(missing)} weights that this model has not, such as {min(missing)}: give the "
            "whole transformers model that it serves"
        )
    quantizer = Quantizer(power_of_two=recipe.scales == "power_of_two")
    forwards: dict[nn.Module, Forward] = {}
    kernels = kernels or kernels_of(model)
    arithmetic = _Arithmetic(quantizer, kernels, exact)
    for name, leaves in held.items():
        module = model.get_submodule(name)
        forwards[module] = _forward_of(module, name, leaves, arithmetic)
    return FakeQuant(forwards, _roundings_of(model, kernels) if roundings else None)


@dataclass(frozen=True)
class _Arithmetic:
    """How layers compute."""

    quantizer: Quantizer
    kernels: Kernels
    exact: bool

    def product(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``input @ weightᵀ`` of what both are in FP8."""
        in_fp32 = self.exact or hidden.device.type == "cpu"
        made: torch.Tensor = _Product.apply(hidden, weight, self.quantizer, in_fp32)  # type: ignore[no-untyped-call]
        return made


def _roundings_of(model: nn.Module, kernels: Kernels) -> EngineRoundings | None:
    try:
        return engine_roundings(model, kernels)
    except ValueError as error:
        logger.warning("%s: the trainer's logprobs will be further from the engines'", error)
        return None


def _own(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


def _forward_of(module: nn.Module, name: str, held: set[str], arithmetic: _Arithmetic) -> Forward:
    if isinstance(module, nn.Linear) and held == {"weight"}:
        return _linear_forward(module, arithmetic)
    if held == _STACKED and callable(getattr(module, "act_fn", None)):
        return _experts_forward(module, arithmetic)
    raise ValueError(
        f"{name} is a {type(module).__name__} with {', '.join(sorted(held))} in FP8. Known here are Linear layers, and "
        f"experts with {' and '.join(sorted(_STACKED))}, act_fn between them"
    )


def _linear_forward(module: nn.Linear, arithmetic: _Arithmetic) -> Forward:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        made = arithmetic.product(hidden, module.weight)
        return (made if module.bias is None else made + module.bias).to(_made(hidden))

    return forward


def _experts_forward(module: Any, arithmetic: _Arithmetic) -> Forward:
    def forward(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        # taken apart once: the gradient of a view of one expert alone would be as large as all of them
        gates_ups, downs = module.gate_up_proj.unbind(), module.down_proj.unbind()
        output = torch.zeros_like(hidden, dtype=torch.float32)
        on_cpu, rounded = arithmetic.kernels == "cpu", _made(hidden)
        if on_cpu:  # vLLM's router for the CPU rounds them, its kernel for CUDA does not
            top_k_weights = top_k_weights.to(rounded)
        for expert, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            if len(token):
                # rounded where engines on the CPU do, ``CpuBlockMoEMethod``; vLLM's kernels for CUDA round what the
                # activation makes of the gate, and each expert's weighted result, as well
                both = arithmetic.product(hidden[token], gate_up).to(rounded).float()
                gate, up = both.chunk(2, dim=-1)
                gated = module.act_fn(gate) if on_cpu else module.act_fn(gate).to(rounded)
                made = arithmetic.product((gated * up).to(rounded), down).float() * top_k_weights[token, place, None]
                output = output.index_add(0, token, made if on_cpu else made.to(rounded).float())
        return output.to(hidden.dtype)

    return forward


def _made(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of a layer's result: that of autocast, or of its input."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _Product(torch.autograd.Function):
    """``input @ weightᵀ`` of what both are in FP8; input [..., K], weight [N, K]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, quantizer: Quantizer, in_fp32: bool
    ) -> torch.Tensor:
        kind = hidden.device.type
        ctx.quantizer, ctx.computed = quantizer, torch.float32 if in_fp32 else _made(hidden)
        ctx.save_for_backward(hidden, weight)
        with torch.autocast(kind, enabled=False):
            inputs, weights = through_groups(hidden), _through_blocks(weight, quantizer)
            return linear(inputs.to(ctx.computed), weights.to(ctx.computed))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(ctx.computed)
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (gradient @ _through_blocks(weight, ctx.quantizer).to(ctx.computed)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            inputs = through_groups(hidden).to(ctx.computed)
            of_weight = (gradient.flatten(0, -2).T @ inputs.flatten(0, -2)).to(weight.dtype)
        return of_hidden, of_weight, None, None


def through_groups(hidden: torch.Tensor) -> torch.Tensor:
    """What an engine makes of a layer's input [..., K]: rounded to BF16, then to FP8 in groups of 1×128; fp32.

    ``s = max(max|x|, 1e-10) / 448`` in fp32, as in vLLM's ``per_token_group_quant_fp8``. Raises RuntimeError if K is no
    multiple of 128.
    """
    groups = hidden.to(torch.bfloat16).float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=_GROUP_FLOOR)
    scales = largest / torch.full_like(largest, E4M3_MAX)  # divided, as in ``block_scales``
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(CODES)
    decoded: torch.Tensor = codes.float() * scales
    return decoded.flatten(-2)


def _through_blocks(weight: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    [(codes, scales)] = quantizer.quantize([("weight", weight.detach())])
    return dequantize_blockwise(codes, scales)
