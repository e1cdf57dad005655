"""Names of routed experts: stacked in a trainer's memory, separate in a checkpoint and in a weight version.

transformers 5 holds the experts of a layer as two 3-D parameters, ``…experts.gate_up_proj`` [E, 2·I, H] and
``…experts.down_proj`` [E, H, I]. Checkpoints, Megatron bridges and vLLM's loaders use ``…experts.3.up_proj.weight`` [I,
H]. Trainers may send either form; a version stores the second, which published FP8 checkpoints have.
"""

from dataclasses import dataclass

from pydantic import Field

from rollout_service.protocol.base import Frozen

STACKED_GATE_UP, STACKED_DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class ExpertNaming(Frozen):
    """Names on disk of tensors that a model family holds under other names in memory, above all of routed experts."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"
    """Name on disk of the module that holds ``gate`` and ``experts``; in memory it is always ``mlp``."""
    renamed: dict[str, str] = Field(default_factory=dict)
    """Renamed tensors that the fields above do not cover: name in memory → name on disk."""


@dataclass(frozen=True)
class Piece:
    """A stored tensor and the view of the trainer's tensor that it is: ``tensor[index]``."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


def pieces(name: str, shape: tuple[int, ...], naming: ExpertNaming | None) -> tuple[Piece, ...]:
    """Return the stored tensors that one tensor of a trainer becomes: itself, or each expert's matrices.

    ``naming`` is None for a dense model. Raises ValueError for stacked experts whose shape cannot be split.
    """
    if naming is None:
        return (Piece(name, shape),)
    if name in naming.renamed:
        return (Piece(naming.renamed[name], shape),)
    if name.endswith(STACKED_GATE_UP):
        return _gate_and_up(_on_disk(name.removesuffix(".gate_up_proj"), naming), name, shape, naming)
    if name.endswith(STACKED_DOWN):
        _require_stacked(name, shape)
        prefix = _on_disk(name.removesuffix(".down_proj"), naming)
        return tuple(Piece(f"{prefix}.{e}.{naming.down}.weight", shape[1:], (e,)) for e in range(shape[0]))
    return (Piece(_on_disk(name, naming), shape),)


def _gate_and_up(prefix: str, name: str, shape: tuple[int, ...], naming: ExpertNaming) -> tuple[Piece, ...]:
    _require_stacked(name, shape)
    if shape[1] % 2:
        raise ValueError(f"{name} {list(shape)} cannot be gate and up above one another: its second dimension is odd")
    rows, columns = shape[1] // 2, shape[2]
    return tuple(
        Piece(f"{prefix}.{expert}.{leaf}.weight", (rows, columns), (expert, half))
        for expert in range(shape[0])
        for leaf, half in ((naming.gate, slice(0, rows)), (naming.up, slice(rows, 2 * rows)))
    )


def _require_stacked(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(f"{name} has shape {list(shape)}; stacked experts have three dimensions, experts first")


def _on_disk(name: str, naming: ExpertNaming) -> str:
    if naming.block == "mlp":
        return name
    for part in (".experts", ".gate"):
        name = name.replace(f".mlp{part}", f".{naming.block}{part}")
    return name
