"""The log-ratio that every statistic and weight here is made of, checked once."""

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before ``exp``, as in verl's rollout correction: one token must not overflow a mean."""


def masked_log_ratio(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``trainer − rollout`` [batch, tokens], zero where masked out, and the mask as bool. Detached, at least fp32.

    All three are [batch, tokens]; ``mask`` is bool or holds 0 and 1, 1 where a sampled token is. What the logprobs
    hold where the mask is 0 (padding: NaN, infinity) has no influence.

    Raises ValueError if the shapes differ or are not [batch, tokens], if no token is selected, if the mask holds
    anything but 0 and 1, or if a selected logprob is not finite.
    """
    _require_same_shape(trainer_logprobs, rollout_logprobs, mask)
    selected = _as_bool(mask)
    for name, logprobs in (("trainer_logprobs", trainer_logprobs), ("rollout_logprobs", rollout_logprobs)):
        _require_finite(logprobs, selected, name)
    difference = _widened(trainer_logprobs) - _widened(rollout_logprobs)
    return torch.where(selected, difference, torch.zeros_like(difference)), selected


def _widened(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.detach().to(torch.promote_types(logprobs.dtype, torch.float32))


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
            f"({int(offending.sum())} such tokens): every sampled token has a finite logprob, so look for what made it"
        )
