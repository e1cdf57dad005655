"""Names of a model's tensors on disk, derived from how transformers saves it: for families without a table."""

import re
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from rollout_service.compat.transformers_internals import as_saved
from rollout_service.protocol.experts import STACKED_DOWN, STACKED_GATE_UP, ExpertNaming, pieces

_EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<leaf>.+)\.weight$")


def naming_of(model: PreTrainedModel) -> ExpertNaming | None:
    """Return how names on disk follow from the names of ``model``, which is on the meta device. None: they are equal.

    Experts that are stacked on disk, too, are ordinary tensors. Raises ValueError if transformers saves the model in
    another way than by renaming tensors and splitting experts.
    """
    held: dict[str, torch.Tensor] = dict(model.state_dict())
    saved = {name: tuple(tensor.shape) for name, tensor in as_saved(model, dict(held)).items()}
    naming = _expert_naming(model, held, saved)
    renamed = {}
    for name, tensor in held.items():
        stored = {piece.name: piece.shape for piece in pieces(name, tuple(tensor.shape), naming)}
        if not stored.items() <= saved.items():
            renamed[name] = _name_on_disk(model, name, tensor, saved)
    if renamed:
        naming = (naming or ExpertNaming()).model_copy(update={"renamed": renamed})
    found = {piece.name for name, tensor in held.items() for piece in pieces(name, tuple(tensor.shape), naming)}
    if unknown := sorted(saved.keys() - found):
        raise ValueError(f"cannot map saved tensors to model parameters: {unknown[:4]}")
    return naming


def _expert_naming(
    model: PreTrainedModel, held: Mapping[str, torch.Tensor], saved: Mapping[str, tuple[int, ...]]
) -> ExpertNaming | None:
    stacked = next((name for name in held if name.endswith(STACKED_GATE_UP) and name not in saved), None)
    if stacked is None:
        return None
    in_memory = stacked.removesuffix(STACKED_GATE_UP)
    experts = held[stacked].shape[0]
    # the smallest possible experts, with numbers that distinguish gate from up
    gate_up = torch.tensor([[[0.0], [1.0]]]).repeat(experts, 1, 1)
    leaves: dict[str, str] = {}
    block = in_memory
    for name, tensor in as_saved(model, {stacked: gate_up}).items():
        if (found := _EXPERT.match(name)) is None or tensor.numel() != 1:
            return None  # not split, but renamed: found tensor by tensor
        leaves["up" if tensor.item() else "gate"] = found["leaf"]
        block = found["block"]
    for name in as_saved(model, {in_memory + STACKED_DOWN: torch.zeros(experts, 1, 1)}):
        if (found := _EXPERT.match(name)) is not None:
            leaves["down"] = found["leaf"]
    if leaves.keys() != {"gate", "up", "down"}:
        raise ValueError(f"transformers saves {stacked} in an unknown form: as {sorted(leaves.values())}")
    gate, up, down = leaves["gate"], leaves["up"], leaves["down"]
    if block == in_memory:
        return ExpertNaming(gate=gate, up=up, down=down)
    return ExpertNaming(gate=gate, up=up, down=down, block=block.rpartition(".")[2])


def _name_on_disk(model: PreTrainedModel, name: str, tensor: torch.Tensor, saved: Mapping[str, tuple[int, ...]]) -> str:
    alone = as_saved(model, {name: tensor})
    [on_disk, *others] = alone
    if others or saved.get(on_disk) != tuple(tensor.shape):
        raise ValueError(f"transformers saves {name} {list(tensor.shape)} as {sorted(alone)}: its values are changed")
    return on_disk
