"""Convert the caller's padded or ragged rows to one checked batch of [batch, tokens] tensors."""

from collections.abc import Sequence
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from rollout_service.correction.bounds import require_choice

Rows: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[float]]
"""A tensor [batch, tokens], or one row per sequence of any length: 1-D tensors or lists of numbers."""
Advantages: TypeAlias = Rows | Sequence[float]
"""One advantage per token, in the form of ``Rows``, or one per sequence: a tensor [batch] or [batch, 1], or a list."""
MissingLogprobs: TypeAlias = Literal["refuse", "ratio_1", "mask"]


def as_batch(
    trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None, missing_logprobs: MissingLogprobs = "refuse"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return both logprobs and the mask (bool) as checked tensors of one shape [batch, tokens], and the share of
    missing rollout logprobs.

    Ragged rows are padded at their ends; numbers become fp32. Without a mask the tokens are those of the ragged rows.
    ``mask`` is bool or 0/1, with 1 at sampled tokens. Values at other positions have no influence. A rollout logprob
    that is not finite is missing: ``ratio_1`` replaces it by the trainer's, ``mask`` removes the token from the mask.

    Raises ValueError if the shapes differ or are not [batch, tokens], if ragged rows differ in length, if there is
    neither a mask nor a ragged argument, if no token is selected, if the mask holds anything but 0 and 1, or if a
    selected logprob is not finite, unless ``missing_logprobs`` allows it.
    """
    require_choice("as_batch", "missing_logprobs", missing_logprobs, get_args(MissingLogprobs))
    given = {"trainer_logprobs": trainer_logprobs, "rollout_logprobs": rollout_logprobs, "mask": mask}
    lengths = _ragged_lengths(given)
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    width = max([*lengths, *(tensor.shape[1] for tensor in tensors if tensor.dim() == 2)], default=0)
    device = _device(trainer_logprobs) or _device(rollout_logprobs) or torch.device("cpu")
    # padded with NaN, so that a mask that selects padding is refused below and never read as probability 1
    trainer = _pad(trainer_logprobs, width, torch.nan, device)
    rollout = _pad(rollout_logprobs, width, torch.nan, device)
    if mask is None:
        if not any(_is_ragged(value) for value in given.values()):
            raise ValueError("give a mask [batch, tokens]: padded logprobs do not tell which positions are tokens")
        mask = [[1] * length for length in lengths]
    chosen = _pad(mask, width, 0, device)
    _require_same_shape(trainer, rollout, chosen)
    selected = _as_bool(chosen)
    _require_finite(trainer, selected, "trainer_logprobs")
    if missing_logprobs == "refuse":
        _require_finite(rollout, selected, "rollout_logprobs")
        return trainer, rollout, selected, 0.0
    missing = selected & ~torch.isfinite(rollout)
    if not isinstance(rollout_logprobs, torch.Tensor):
        # what lies beyond the end of a ragged row is an error of the mask and no missing logprob
        sampled = _pad([[1] * len(row) for row in rollout_logprobs], width, 0, device)
        missing = missing & sampled.bool()
    share = int(missing.sum()) / int(selected.sum())
    if missing_logprobs == "mask":
        selected = selected & ~missing
        if not bool(selected.any()):
            raise ValueError("rollout_logprobs: no sampled token has a finite logprob; check the engine")
    wide = torch.promote_types(trainer.dtype, rollout.dtype)
    rollout = trainer.to(wide).where(missing, rollout.to(wide))
    _require_finite(rollout, selected, "rollout_logprobs")
    return trainer, rollout, selected, share


def as_advantages(advantages: Advantages, selected: torch.Tensor) -> torch.Tensor:
    """Return the advantages as a detached fp64 tensor [batch, tokens], 0 where ``selected`` [batch, tokens] is False.

    Raises ValueError if their shape does not match or if one is not finite at a selected token.
    """
    if isinstance(advantages, torch.Tensor):
        values = advantages
    elif all(isinstance(value, Real) for value in advantages):
        values = torch.tensor(advantages, dtype=torch.float64)
    else:
        values = _pad(advantages, selected.shape[1], torch.nan, selected.device)  # type: ignore[arg-type]
    values = values[:, None] if values.dim() == 1 else values
    batch, tokens = selected.shape
    if values.dim() != 2 or values.shape[0] != batch or values.shape[1] not in (1, tokens):
        raise ValueError(
            f"advantages {list(values.shape)} do not match the batch [{batch}, {tokens}]: give one per sequence, "
            "[batch] or [batch, 1], or one per token"
        )
    values = values.detach().to(selected.device, torch.float64).expand_as(selected)
    _require_finite(values, selected, "advantages")
    return values.where(selected, 0.0)


def _is_ragged(value: Rows | None) -> bool:
    return value is not None and not isinstance(value, torch.Tensor)


def _ragged_lengths(given: dict[str, Rows | None]) -> list[int]:
    """Return the number of tokens of each row of the ragged arguments, which must agree; empty if none is ragged."""
    lengths = {
        name: [len(row) for row in value]
        for name, value in given.items()
        if value is not None and not isinstance(value, torch.Tensor)
    }
    (first, expected), *others = [*lengths.items()] or [("", [])]
    for name, found in others:
        if len(found) != len(expected):
            raise ValueError(f"{name} has {len(found)} rows and {first} has {len(expected)}: one per sequence in both")
        for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if ours != theirs:
                raise ValueError(f"row {row} of {name} has {ours} tokens and of {first} {theirs}: they must agree")
    return expected


def _device(rows: Rows) -> torch.device | None:
    """Return the device of the tensors; None for lists of numbers."""
    first = rows if isinstance(rows, torch.Tensor) else next(iter(rows), None)
    return first.device if isinstance(first, torch.Tensor) else None


def _pad(rows: Rows, width: int, padding: float, device: torch.device) -> torch.Tensor:
    """Return [batch, width], or the given tensor."""
    if isinstance(rows, torch.Tensor):
        return rows
    if not len(rows):
        return torch.zeros(0, width, device=device)
    tensors = [_as_row(row, device) for row in rows]
    joined = pad_sequence(tensors, batch_first=True, padding_value=padding)
    missing = width - joined.shape[1]
    return torch.nn.functional.pad(joined, (0, missing), value=padding) if missing > 0 else joined


def _as_row(row: torch.Tensor | Sequence[float], device: torch.device) -> torch.Tensor:
    if not isinstance(row, torch.Tensor):
        return torch.tensor(row, dtype=torch.float32, device=device)
    if row.dim() != 1:
        raise ValueError(f"a ragged row must be 1-D [tokens], not {list(row.shape)}")
    return row.detach().to(device, torch.promote_types(row.dtype, torch.float32))


def _require_same_shape(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> None:
    if trainer.dim() != 2 or not trainer.shape == rollout.shape == mask.shape:
        raise ValueError(
            "trainer_logprobs, rollout_logprobs and mask must have one shape [batch, tokens], not "
            f"{list(trainer.shape)}, {list(rollout.shape)} and {list(mask.shape)}"
        )


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    selected = mask.bool()
    if not bool((selected.to(mask.dtype) == mask).all()):
        raise ValueError("mask must be bool or hold only 0 and 1: weigh the loss by something else elsewhere")
    if not bool(selected.any()):
        raise ValueError(f"mask {list(mask.shape)} selects no token: a batch without sampled tokens has no mean")
    return selected


def _require_finite(logprobs: torch.Tensor, selected: torch.Tensor, name: str) -> None:
    offending = selected & ~torch.isfinite(logprobs)
    if bool(offending.any()):
        row, column = offending.nonzero()[0].tolist()
        raise ValueError(
            f"{name}[{row}, {column}] is {logprobs[row, column].item()} where the mask is 1 "
            f"({int(offending.sum())} such tokens): every sampled token has a finite value; check its source"
        )
