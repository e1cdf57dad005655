"""Check the caller's padded or ragged rows, and compute the log-ratios behind every weight, rejection and statistic."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from rollout_service.correction.bounds import require_choice

LOG_RATIO_BOUND = 20.0
"""Clamp of logs before ``exp``, as in verl's rollout correction: one token must not overflow a mean."""
Rows: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[float]]
"""A tensor [batch, tokens], or one row per sequence of any length: 1-D tensors or lists of numbers."""
Advantages: TypeAlias = Rows | Sequence[float]
"""One advantage per token, in the form of ``Rows``, or one per sequence: a tensor [batch] or [batch, 1], or a list."""
MissingLogprobs: TypeAlias = Literal["refuse", "ratio_1", "mask"]


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Trainer and rollout over the sampled tokens of a batch. Detached, fp64, zero at other positions."""

    trainer: torch.Tensor
    """Natural logs [batch, tokens]."""
    rollout: torch.Tensor
    """Natural logs [batch, tokens]."""
    log_ratio: torch.Tensor
    """``trainer − rollout`` [batch, tokens], not clamped."""
    selected: torch.Tensor
    """Mask of sampled tokens, bool [batch, tokens]."""
    dtype: torch.dtype
    """Dtype of the returned weights: fp32, or fp64 if a logprob was."""
    missing: float
    """The share of sampled tokens whose rollout logprob was not finite."""
    advantages: torch.Tensor | None
    """[batch, tokens], if the caller gave them."""

    @property
    def required_advantages(self) -> torch.Tensor:
        """Return the advantages. Raises ValueError if the caller gave none."""
        if self.advantages is None:
            raise ValueError("correct: this recipe depends on the sign of the advantages; give advantages=")
        return self.advantages

    @property
    def rows(self) -> torch.Tensor:
        """Return the mask of sequences with a token, bool [batch]. The others are in no mean."""
        return self.selected.any(-1)

    @property
    def bounded(self) -> torch.Tensor:
        """Return ``log_ratio`` clamped to ±20 [batch, tokens]."""
        return bounded(self.log_ratio)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of values, 0 where masked, over each sequence's tokens, [batch, tokens] → [batch]; 0 for
        empty sequences."""
        return values.sum(-1) / self.selected.sum(-1).clamp(min=1)

    def over_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Expand a value per sequence to its tokens, [batch] → [batch, tokens]."""
        return values[:, None].expand_as(self.selected)


def compare(
    trainer_logprobs: Rows,
    rollout_logprobs: Rows,
    mask: Rows | None,
    advantages: Advantages | None = None,
    missing_logprobs: MissingLogprobs = "refuse",
) -> LogRatios:
    """Return the log-ratios of a batch.

    Ragged rows are padded at their ends; numbers become fp32. Without a mask the tokens are those of the ragged rows.
    ``mask`` is bool or 0/1, with 1 at sampled tokens. Values at other positions have no influence. A rollout logprob
    that is not finite is missing: ``ratio_1`` replaces it by the trainer's, ``mask`` removes the token from the mask.

    Raises ValueError if the shapes differ or are not [batch, tokens], if ragged rows differ in length, if there is
    neither a mask nor a ragged argument, if no token is selected, if the mask holds anything but 0 and 1, if a selected
    logprob is not finite, unless ``missing_logprobs`` allows it, or if an advantage is not finite or does not fit.
    """
    require_choice("correct", "missing_logprobs", missing_logprobs, get_args(MissingLogprobs))
    trainer, rollout, chosen = _padded(trainer_logprobs, rollout_logprobs, mask)
    selected = _as_bool(chosen)
    dtype = torch.promote_types(torch.promote_types(trainer.dtype, rollout.dtype), torch.float32)
    # fp64: the k3 of a token with a tiny ratio is far below what fp32 resolves beside 1
    trainer, rollout = trainer.detach().double(), rollout.detach().double()
    _require_finite(trainer, selected, "trainer_logprobs")
    share_missing = 0.0
    if missing_logprobs != "refuse":
        missing = selected & ~torch.isfinite(rollout)
        if not isinstance(rollout_logprobs, torch.Tensor):
            # what lies beyond the end of a ragged row is an error of the mask and no missing logprob
            lengths = torch.tensor([len(row) for row in rollout_logprobs], device=missing.device)
            missing &= torch.arange(missing.shape[1], device=missing.device) < lengths[:, None]
        share_missing = int(missing.sum()) / int(selected.sum())
        if missing_logprobs == "mask":
            selected = selected & ~missing
            if not bool(selected.any()):
                raise ValueError("rollout_logprobs: no sampled token has a finite logprob; check the engine")
        rollout = trainer.where(missing, rollout)
    _require_finite(rollout, selected, "rollout_logprobs")
    trainer, rollout = trainer.where(selected, 0.0), rollout.where(selected, 0.0)
    of_tokens = None if advantages is None else _as_advantages(advantages, selected)
    return LogRatios(trainer, rollout, trainer - rollout, selected, dtype, share_missing, of_tokens)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp(lr) − 1 − lr``, any shape, with lr clamped to ±20 (Schulman, "Approximating KL Divergence",
    2020)."""
    safe = bounded(log_ratio)
    return torch.expm1(safe) - safe  # exp(lr) − 1 alone loses every digit of a small ratio


def chi2(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``ρ² − 1``, any shape, with ``lr`` clamped to ±20 (verl)."""
    return torch.expm1(2.0 * bounded(log_ratio))


def mult_prob_error(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp |lr|``, any shape, with |lr| clamped to 20 (NeMo-RL)."""
    return bounded(log_ratio.abs()).exp()


def bounded(log: torch.Tensor) -> torch.Tensor:
    """Clamp ``log`` to ±20, safe for exp; any shape."""
    return log.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def share(condition: torch.Tensor) -> float:
    """Return the share of True in a mask of any shape."""
    return condition.double().mean().item()


def _padded(
    trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return both logprobs and the mask as tensors of one shape [batch, tokens]."""
    given = {"trainer_logprobs": trainer_logprobs, "rollout_logprobs": rollout_logprobs, "mask": mask}
    lengths = _ragged_lengths({name: value for name, value in given.items() if value is not None})
    if mask is None:
        if lengths is None:
            raise ValueError("give a mask [batch, tokens]: padded logprobs do not tell which positions are tokens")
        mask = [[1] * length for length in lengths]
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    width = max([*(lengths or ()), *(tensor.shape[1] for tensor in tensors if tensor.dim() == 2)], default=0)
    device = _device(trainer_logprobs) or _device(rollout_logprobs) or torch.device("cpu")
    # padded with NaN, so that a mask that selects padding is refused and never read as probability 1
    trainer = _pad(trainer_logprobs, width, torch.nan, device)
    rollout = _pad(rollout_logprobs, width, torch.nan, device)
    chosen = _pad(mask, width, 0, device)
    if trainer.dim() != 2 or not trainer.shape == rollout.shape == chosen.shape:
        raise ValueError(
            "trainer_logprobs, rollout_logprobs and mask must have one shape [batch, tokens], not "
            f"{list(trainer.shape)}, {list(rollout.shape)} and {list(chosen.shape)}"
        )
    return trainer, rollout, chosen


def _ragged_lengths(given: dict[str, Rows]) -> list[int] | None:
    """Return the number of tokens of each row of the ragged arguments, which must agree; None if none is ragged."""
    ragged = {name: [*map(len, value)] for name, value in given.items() if not isinstance(value, torch.Tensor)}
    if not ragged:
        return None
    (first, expected), *others = ragged.items()
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
    """Return [batch, width] on ``device``; of a given tensor, its own shape."""
    if isinstance(rows, torch.Tensor):
        return rows.to(device)
    if not len(rows):
        return torch.zeros(0, width, device=device)
    padded = pad_sequence([_as_row(row, device) for row in rows], batch_first=True, padding_value=padding)
    return torch.nn.functional.pad(padded, (0, max(width - padded.shape[1], 0)), value=padding)


def _as_row(row: torch.Tensor | Sequence[float], device: torch.device) -> torch.Tensor:
    if not isinstance(row, torch.Tensor):
        return torch.tensor(row, dtype=torch.float32, device=device)
    if row.dim() != 1:
        raise ValueError(f"a ragged row must be 1-D [tokens], not {list(row.shape)}")
    return row.detach().to(device, torch.promote_types(row.dtype, torch.float32))


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    selected = mask.bool()
    if not bool((selected.to(mask.dtype) == mask).all()):
        raise ValueError("mask must be bool or hold only 0 and 1: multiply the loss by other weights afterwards")
    if not bool(selected.any()):
        raise ValueError(f"mask {list(mask.shape)} selects no token: a batch without sampled tokens has no mean")
    return selected


def _as_advantages(advantages: Advantages, selected: torch.Tensor) -> torch.Tensor:
    """Return the advantages as a detached fp64 tensor [batch, tokens], 0 where ``selected`` is False."""
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


def _require_finite(values: torch.Tensor, selected: torch.Tensor, name: str) -> None:
    offending = selected & ~torch.isfinite(values)
    if bool(offending.any()):
        row, column = offending.nonzero()[0].tolist()
        raise ValueError(
            f"{name}[{row}, {column}] is {values[row, column].item()} where the mask is 1 "
            f"({int(offending.sum())} such tokens): every sampled token has a finite value; check its source"
        )
