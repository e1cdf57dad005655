"""A policy that is computed as the service's engines compute it, for training through their quantization.

    with AsEngine(model, client.recipe()) as policy:
        train(client, model, tokenizer, steps, seed, policy=policy)

Masters stay in fp32, as with any training in BF16: the optimizer steps them, and each forward pass is that of a copy in
BF16 whose layers round as the engines do (``rollout_service.quant.fake_quant``). Its gradients are the masters'.
"""

import copy
from typing import Self

import torch
from transformers import PreTrainedModel

from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.fake_quant import fake_quant


class AsEngine:
    """The copy that computes, in a ``with`` block: what ``fake_quant`` registers with transformers ends with that."""

    def __init__(self, masters: PreTrainedModel, recipe: TrainerRecipe) -> None:
        """``recipe``: of the service, ``client.recipe()``. Raises what ``fake_quant`` raises."""
        self._masters = masters
        self._computed = copy.deepcopy(masters)
        for parameter in self._computed.parameters():
            # not ``.to()`` of the whole model, which would round the rotary embedding's frequencies as well
            parameter.data = parameter.data.to(torch.bfloat16)
        self._layers = fake_quant(self._computed, recipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._layers.remove()

    def logits(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """fp32 [B, keep, V], of the last ``keep`` positions of ``tokens`` int64 [B, P], by the masters as they are."""
        with torch.no_grad():
            for computed, master in self._pairs():
                computed.copy_(master)
        made: torch.Tensor = self._computed(tokens, use_cache=False, logits_to_keep=keep).logits
        return made.float()

    def hand_gradients_over(self) -> None:
        """Give the masters the gradients of the last backward pass."""
        for computed, master in self._pairs():
            master.grad = None if computed.grad is None else computed.grad.to(master.dtype)
            computed.grad = None

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return list(zip(self._computed.parameters(), self._masters.parameters(), strict=True))
