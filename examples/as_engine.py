"""A policy that is computed as the service's engines compute it, for training through their quantization.

    with AsEngine(model, client.recipe()) as policy:
        train(client, model, tokenizer, steps, seed, policy=policy)

Masters stay in fp32, as with any training in BF16: the optimizer steps them, and each forward pass is that of a copy in
BF16, ``InBf16``, whose gradients are the masters'. Layers of ``AsEngine`` also round as the engines do
(``rollout_service.quant.fake_quant``).
"""

import copy
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.fake_quant import fake_quant


class InBf16:
    """A copy of a model in BF16 that computes its forward and backward passes."""

    def __init__(self, masters: PreTrainedModel) -> None:
        """Copy ``masters``, which keep their dtype, device and mode."""
        self._masters = masters
        self.model = copy.deepcopy(masters)
        for parameter in self.model.parameters():
            # not ``.to()`` of the whole model, which would round the rotary embedding's frequencies as well
            parameter.data = parameter.data.to(torch.bfloat16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep the copy: only ``AsEngine`` has something to remove."""

    def outputs(self, tokens: torch.Tensor, **options: Any) -> Any:
        """Return transformers' output for ``tokens`` int64 [B, P], computed with the masters' present weights."""
        with torch.no_grad():
            for computed, master in self._pairs():
                computed.copy_(master)
        return self.model(tokens, use_cache=False, **options)

    def logits(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """fp32 [B, keep, V], of the last ``keep`` positions of ``tokens`` int64 [B, P], by the masters as they are."""
        made: torch.Tensor = self.outputs(tokens, logits_to_keep=keep).logits
        return made.float()

    def hand_gradients_over(self) -> None:
        """Give the masters the gradients of the last backward pass."""
        for computed, master in self._pairs():
            master.grad = None if computed.grad is None else computed.grad.to(master.dtype)
            computed.grad = None

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return list(zip(self.model.parameters(), self._masters.parameters(), strict=True))


class AsEngine(InBf16):
    """The copy that rounds as engines do, in a ``with`` block: what ``fake_quant`` registers with transformers ends
    with that."""

    def __init__(self, masters: PreTrainedModel, recipe: TrainerRecipe) -> None:
        """``recipe``: of the service, ``client.recipe()``. Raises what ``fake_quant`` raises."""
        super().__init__(masters)
        self._layers = fake_quant(self.model, recipe)

    def __exit__(self, *_: object) -> None:
        self._layers.remove()
