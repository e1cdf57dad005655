"""Replace the forward passes of single modules for a while; forward passes of LoRA adapters as vLLM computes them.

vLLM 0.32 reads the layer's input before its quantization, and computes PEFT's adapters on a CPU and on a GPU alike,
beside the product of their linear layer:

    buffer = x @ Aᵀ                   in fp32, from A in the model's dtype
    change = buffer @ (α/r · B)ᵀ      rounds the scaled B and the buffer first; sums in fp32, rounded once
    y = base + change                 the sum of two rounded numbers, rounded

The gradients of A and B are those of the rounded matrices (straight-through).
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import linear

Forward = Callable[..., Any]


class Forwards:
    """Modules with replaced forward passes, until ``remove()`` or the end of a ``with`` block."""

    def __init__(self, forwards: Mapping[nn.Module, Forward]) -> None:
        self._ours = dict(forwards)
        self._before = {module: vars(module).get("forward") for module in forwards}
        for module, forward in forwards.items():
            module.forward = forward  # an instance attribute, which hides the method

    def remove(self) -> None:
        """Restore the previous forward passes, including ones set by other code; may be called again.

        Raises RuntimeError, and restores none, if a module's forward has been replaced again since.
        """
        for module, forward in self._ours.items():
            if vars(module).get("forward") is not forward:
                raise RuntimeError(
                    f"the forward of a {type(module).__name__} was replaced again and may call ours: undo that first"
                )
        for module in self._ours:
            before = self._before[module]
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._ours, self._before = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def adapter_forwards(model: nn.Module) -> dict[nn.Module, Forward]:
    """Return the forward passes of the layers with an adapter; an empty one for a model without adapters.

    Raises ValueError for adapters that the service refuses, and for merged ones.
    """
    found: dict[nn.Module, Forward] = {}
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            if why := _why_unknown(module):
                raise ValueError(f"{name} {why}")
            found[module] = _adapter_forward(module)
    return found


def _why_unknown(layer: Any) -> str | None:
    """Return the reason why engines do not compute a PEFT layer as ``_adapter_forward`` does."""
    # AdaLoRA's layers, too, have matrices of these names
    if not isinstance(layer.base_layer, nn.Linear) or not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
        return f"is PEFT's {type(layer).__name__}: only LoRA of linear layers is known"
    if layer.lora_variant or any(matrix.bias is not None for matrix in layer.lora_B.values()):
        return "has DoRA, a bias or another variant, which the service does not serve: train plain LoRA"
    if layer.merged:
        return "holds an adapter that is merged into its weight, unlike the engines': call unmerge_adapter() first"
    return None


def _adapter_forward(layer: Any) -> Forward:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = layer.base_layer(hidden)
        for name in () if layer.disable_adapters else layer.active_adapters:
            if name in layer.lora_A:
                buffer = _product(layer.lora_dropout[name](hidden), layer.lora_A[name].weight, 1.0, made.dtype)
                change = _product(buffer, layer.lora_B[name].weight, layer.scaling[name], made.dtype)
                made = made + change.to(made.dtype)
        return made

    return forward


class _Product(torch.autograd.Function):
    """``input @ (scaling · weight)ᵀ`` in fp32 of an input [..., K] and a weight [N, K] that are rounded to a dtype.

    It saves both as they come: rounded copies in fp32 would take more memory.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, scaling: float, rounded: torch.dtype
    ) -> torch.Tensor:
        ctx.scaling, ctx.rounded = scaling, rounded
        ctx.save_for_backward(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.to(rounded).float(), _scaled(weight, scaling, rounded))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (gradient @ _scaled(weight, ctx.scaling, ctx.rounded)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            inputs = hidden.to(ctx.rounded).float().flatten(0, -2)
            of_weight = (gradient.flatten(0, -2).T @ inputs * ctx.scaling).to(weight.dtype)
        return of_hidden, of_weight, None, None


_product: Callable[..., torch.Tensor] = _Product.apply


def _scaled(weight: torch.Tensor, scaling: float, rounded: torch.dtype) -> torch.Tensor:
    # vLLM multiplies B after the conversion to the model's dtype
    return (weight.to(rounded) * scaling).float()
