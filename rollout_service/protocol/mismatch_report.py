"""What a trainer sends to ``POST /v1/mismatch``. Pydantic only: client and service share it."""

from pydantic import ConfigDict, Field, model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Span

REPORT_BYTES = 32 << 20
"""Longest body of one report; a trainer with more sends several."""


class ReportedCompletion(Frozen):
    """One completion, seen by the trainer. Logprobs are natural logs [tokens] of the sampled tokens, as in Completion.

    Either ``rollout_logprobs`` and ``spans`` stand here, or the rollout is one that the service remembers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    trainer_logprobs: list[float]
    rollout_logprobs: list[float] | None = None
    spans: tuple[Span, ...] | None = None
    """Which version sampled which tokens, on which replica; they cover all."""
    mask: list[bool] | None = None
    """Tokens to count; None: all. What stands elsewhere has no influence."""
    index: int | None = Field(default=None, ge=0)
    """Which completion of a remembered rollout this is; None: its place in this report."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> "ReportedCompletion":
        if (self.rollout_logprobs is None) != (self.spans is None):
            raise ValueError("send rollout_logprobs and spans together, or neither for a rollout that is remembered")
        return self


class ReportedRollout(Frozen):
    """The completions of one rollout."""

    completions: tuple[ReportedCompletion, ...]
    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Of the rollout's reply: what is left out here is looked up by it."""
    replica_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Of the rollout's reply: of spans that name none. Needed with ``rollout_logprobs``, unless all spans do."""
    truncated_sampling: bool = False
    """Of the rollout's reply. Its tokens are counted apart and not judged, unless they are ``renormalized``."""
    renormalized: bool = False
    """``trainer_logprobs`` are renormalized over the rollout's sampling mask, as its own logprobs are."""

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> "ReportedRollout":
        looked_up = [completion.spans is None for completion in self.completions]
        if any(looked_up) and self.request_id is None:
            raise ValueError("no request_id: without it every completion needs rollout_logprobs and spans")
        unnamed = any(span.replica_id is None for c in self.completions for span in c.spans or ())
        if unnamed and self.replica_id is None:
            raise ValueError("no replica_id: it is needed where a completion brings its rollout_logprobs")
        return self


class MismatchReport(Frozen):
    """The body of one report."""

    rollouts: tuple[ReportedRollout, ...] = Field(min_length=1)
    report_id: str | None = Field(default=None, min_length=1, max_length=256)
    """A report that comes again under the same name counts once; None: it is not sent again."""
