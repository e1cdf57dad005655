"""Body of ``POST /v1/mismatch``, sent by trainers. Needs only pydantic: client and service share it."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Span

REPORT_BYTES = 32 << 20
"""Maximum body size of one report in bytes; a trainer with more sends several."""


class ReportedCompletion(Frozen):
    """One completion with the trainer's logprobs: natural logs [tokens] of the sampled tokens, as in Completion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    trainer_logprobs: list[float] = Field(fail_fast=True)
    rollout_logprobs: list[float] = Field(fail_fast=True)
    spans: tuple[Span, ...] = Field(fail_fast=True)
    """The version and replica that sampled each range of tokens; the ranges cover all tokens."""
    mask: Annotated[list[bool], Field(fail_fast=True)] | None = None
    """Tokens to count; None: all. Values at other tokens have no influence."""


class ReportedRollout(Frozen):
    """The completions of one rollout."""

    completions: tuple[ReportedCompletion, ...] = Field(fail_fast=True)
    replica_id: str | None = Field(default=None, min_length=1, max_length=256)
    """The ``replica_id`` of the rollout's reply, for spans without one. Required unless all spans have one."""
    truncated_sampling: bool = False
    """The ``truncated_sampling`` of the rollout's reply. Its tokens are counted apart and not judged, unless they are
    ``renormalized``."""
    renormalized: bool = False
    """True if ``trainer_logprobs`` are renormalized over the rollout's sampling mask, as its own logprobs are."""

    @model_validator(mode="after")
    def _has_replicas(self) -> "ReportedRollout":
        unnamed = any(span.replica_id is None for completion in self.completions for span in completion.spans)
        if unnamed and self.replica_id is None:
            raise ValueError("no replica_id: it is needed unless every span has one")
        return self


class MismatchReport(Frozen):
    """The body of one report."""

    rollouts: tuple[ReportedRollout, ...] = Field(min_length=1, fail_fast=True)
    report_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the report; repeated reports of one name count once. None: the report is not sent again."""
