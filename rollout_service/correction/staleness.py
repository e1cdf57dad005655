"""Age of the weights that sampled each token: versions, lag, and a filter."""

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
    """Return the weight version that sampled each token, int64 [batch, tokens]; −1 at padding.

    ``spans``: the spans of each completion. ``num_tokens``: padded length of rows; None: the longest. Raises ValueError
    for a longer completion.
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
    """Return the number of versions that the trainer is ahead of each token, int64, same shape; 0 at padding.

    ``trainer_version``: the version of the weights being trained, as they were or will be pushed. Raises ValueError for
    a token of a newer version.
    """
    newest = int(versions.max()) if versions.numel() else NO_TOKEN
    if newest > trainer_version:
        raise ValueError(
            f"a token was sampled by version {newest}, but trainer_version={trainer_version}: give the version that "
            "the trainer pushed last"
        )
    return (trainer_version - versions).masked_fill(versions == NO_TOKEN, 0)


def fresh_tokens(
    versions: torch.Tensor, trainer_version: int, max_lag: int, level: FreshnessLevel = "sequence"
) -> torch.Tensor:
    """Return the mask of tokens at most ``max_lag`` versions old, bool, same shape; False at padding. A mask for
    ``correct``.

    ``sequence``: a completion with an older token is dropped as a whole, like in rejections by sequence. ``token``:
    only older tokens are dropped. Raises ValueError for a negative ``max_lag``, an unknown level, or a token newer than
    the trainer.
    """
    require_choice("fresh_tokens", "level", level, get_args(FreshnessLevel))
    if max_lag < 0:
        raise ValueError(f"max_lag={max_lag} must not be negative: 0 keeps what the trainer's own version sampled")
    sampled = versions != NO_TOKEN
    fresh = token_lag(versions, trainer_version) <= max_lag
    if level == "sequence":
        fresh = fresh.all(-1, keepdim=True)
    return fresh & sampled
