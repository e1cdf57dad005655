"""Routing replay (R3): a trainer sends each token to the experts that the engine sent it to.

    rollouts = client.generate_batch(prompts, n=8, return_routed_experts=True)  # engine.return_routed_experts: true
    experts, known = replay_batch(rollouts)
    with replayed(model, experts, known):
        logits = model(tokens, attention_mask=mask).logits
        …
        loss.backward()  # inside the block: gradient checkpointing computes the choice again

Engine and trainer differ in their last bits, and a token that lies between two experts goes to one in the engine and to
the other in the trainer: its logprob is then another by nats, and so is the importance ratio. Replayed, the choice is
the engine's, and the weights of the chosen experts are still those of the trainer's own logits, through which the
router learns (arXiv 2510.11370). A token whose experts are not known goes where the trainer's router sends it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rollout_service.protocol.rollout import Rollout
from rollout_service.quant.forwards import Forward, Forwards

ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Of transformers 5: each returns logits [tokens, experts], weights and indices of the chosen [tokens, topk]."""


def replay_batch(rollouts: Sequence[Rollout], length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [B, T, layers, topk] and bool [B, T], which are known, of all completions, padded at the end.

    ``length``: T; None: of the longest prompt with its completion. Raises ValueError for a rollout without experts, or
    longer than ``length``.
    """
    rows = [rollout.routed_experts(c.index) for rollout in rollouts for c in rollout.completions]
    longest = max(len(known) for _, known in rows)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"a prompt with its completion has {longest} tokens, and length={length}")
    experts = torch.zeros(len(rows), length, *rows[0][0].shape[1:], dtype=torch.int64)
    known = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (of_tokens, are_known) in enumerate(rows):
        experts[row, : len(of_tokens)] = torch.from_numpy(of_tokens.astype("int64"))
        known[row, : len(are_known)] = torch.from_numpy(are_known)
    return experts, known


@contextmanager
def replayed(model: nn.Module, experts: torch.Tensor, known: torch.Tensor) -> Iterator[None]:
    """Routers of a transformers ``model`` choose these experts in forward passes of exactly these tokens.

    Args:
        model: with ``ROUTERS``; dense layers among them do not matter.
        experts: int [B, T, layers, topk], for all layers of the model.
        known: bool [B, T]; the others are the router's own choice.

    Raises ValueError if the model has no such router, or other layers or another topk; in a forward pass, if that has
    another number of tokens.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList) and _routers(module)]
    if len(layers) != 1:
        raise ValueError(
            f"{type(model).__name__} has no layers with {' or '.join(ROUTERS)}, whose choice is known here"
        )
    routers = _routers(layers[0])
    topk = {router.top_k for router in routers.values()}
    if experts.shape[2] != len(layers[0]) or topk != {experts.shape[3]}:
        raise ValueError(
            f"experts of {experts.shape[2]} layers, {experts.shape[3]} a token, for a model of {len(layers[0])} layers "
            f"with {sorted(topk)}"
        )
    flat, told = experts.flatten(0, 1), known.flatten()
    forwards = Forwards({router: _replaying(router, flat[:, index], told) for index, router in routers.items()})
    try:
        yield
    finally:
        forwards.remove()


def _routers(layers: nn.ModuleList) -> dict[int, Any]:
    """By the index of their layer."""
    found = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if type(module).__name__ in ROUTERS:
                found[index] = module
    return found


def _replaying(router: Any, experts: torch.Tensor, known: torch.Tensor) -> Forward:
    """``experts`` [tokens, topk], ``known`` [tokens]."""
    own = router.forward

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, chosen = own(hidden)
        if len(logits) != len(known):
            raise ValueError(f"a forward pass of {len(logits)} tokens, and experts to replay of {len(known)}")
        chosen = torch.where(known.to(chosen.device)[:, None], experts.to(chosen.device), chosen)
        replayed_weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob:
            replayed_weights = replayed_weights / replayed_weights.sum(-1, keepdim=True)
        return logits, replayed_weights.to(weights.dtype), chosen

    return forward
