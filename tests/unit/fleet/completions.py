"""Completions as engines make them."""

from collections.abc import Sequence

from rollout_service.protocol.rollout import Completion, FinishReason, Span


def completion_of(
    tokens: Sequence[int],
    *spans: tuple[int, int],
    index: int = 0,
    end: FinishReason = "abort",
    stop: int | str | None = None,
) -> Completion:
    """A completion of ``tokens``, each with a logprob of −0.1 times its number. ``spans``: (version, length); without
    them all tokens are of version 1."""
    made, start = [], 0
    for version, length in spans or ((1, len(tokens)),) * bool(tokens):
        made.append(Span(version=version, start=start, end=start + length))
        start += length
    return Completion(
        index=index,
        token_ids=tuple(tokens),
        logprobs=tuple(-0.1 * token for token in tokens),
        finish_reason=end,
        stop_reason=stop,
        spans=tuple(made),
    )
