"""How old the weights are that sampled each token: versions, lag, and a filter."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from rollout_service.correction.bounds import require_choice
from rollout_service.protocol.rollout import Span

FreshnessLevel: TypeAlias = Literal["token", "sequence"]
NO_TOKEN = -1
"""The version of padding."""


def token_versions(
    spans: Sequence[Sequence[Span]], num_tokens: int | None = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """The weight version that sampled each token, int64 [batch, tokens]; −1 at padding.

    ``spans``: those of each completion. ``num_tokens``: what rows are padded to; None: the longest. Raises ValueError
    for a completion that is longer.
    """
    longest = max((row[-1].end for row in spans if row), default=0)
    width = longest if num_tokens is None else num_tokens
    if longest > width:
        raise ValueError(f"a completion has {longest} tokens, more than num_tokens={width}")
    versions = torch.full((len(spans), width), NO_TOKEN, dtype=torch.int64)
    for row, of_completion in enumerate(spans):
        for span in of_completion:
            versions[row, span.start : span.end] = span.version
    return versions.to(device)


def token_lag(versions: torch.Tensor, trainer_version: int) -> torch.Tensor:
    """Versions that the trainer is ahead of each token, int64, same shape; 0 at padding.

    ``trainer_version``: the version of the weights that are trained now, as they were or will be pushed. Raises
    ValueError if a token is of a newer one.
    """
    newest = int(versions.max()) if versions.numel() else NO_TOKEN
    if newest > trainer_version:
        raise ValueError(f"a token was sampled by version {newest}, but the trainer is at {trainer_version}")
    return (trainer_version - versions).masked_fill(versions == NO_TOKEN, 0)


def fresh_tokens(
    versions: torch.Tensor, trainer_version: int, max_lag: int, level: FreshnessLevel = "sequence"
) -> torch.Tensor:
    """Which tokens are at most ``max_lag`` versions old, bool, same shape; False at padding. A mask for ``correct``.

    ``sequence``: a completion with one token that is older goes as a whole, as rejections by sequence do. ``token``:
    only the older tokens. Raises ValueError for a negative ``max_lag``, an unknown level, or a token newer than the
    trainer.
    """
    require_choice("fresh_tokens", "level", level, get_args(FreshnessLevel))
    if max_lag < 0:
        raise ValueError(f"max_lag={max_lag} must not be negative: 0 keeps what the trainer's own version sampled")
    sampled = versions != NO_TOKEN
    fresh = token_lag(versions, trainer_version) <= max_lag
    if level == "sequence":
        fresh = fresh.all(-1, keepdim=True)
    return fresh & sampled
