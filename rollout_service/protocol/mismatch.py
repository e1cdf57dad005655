"""The mismatch between engines and trainer: what trainers report, and what the monitor finds."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from rollout_service.protocol.base import Frozen
from rollout_service.protocol.rollout import Span

FIRST_KV_AGE = 1
"""The maximum age of kept keys and values with which ``weights.kv_max_age: auto`` begins."""

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
    """Body of ``POST /v1/mismatch``, sent by trainers."""

    rollouts: tuple[ReportedRollout, ...] = Field(min_length=1, fail_fast=True)
    report_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Name of the report; repeated reports of one name count once. None: the report is not sent again."""


class Suspicion(Frozen):
    """Reason why a version is suspect: the logprobs of one replica differ too much from the trainer's."""

    replica_id: str
    since: float
    """Unix time in seconds."""
    tokens: int
    """Number of tokens measured so far; ``k3`` and ``prob_error`` as in MismatchRow."""
    k3: float
    prob_error: float
    adapter: str | None = None
    """The adapter that sampled them, with ``version`` of the model; None: none."""
    adapter_version: int | None = None


class KVAgeRow(Frozen):
    """The mismatch of the tokens whose keys and values had one age."""

    age: int
    """The span's version minus its ``kv_from``; 0 without ``kv_from``. The highest age includes all above."""
    tokens: int
    k3: float
    """The mean over these tokens, as ``prob_error`` is."""
    prob_error: float


class MismatchRow(Frozen):
    """Distance of sampled tokens' logprobs from the trainer's, with ``lr = trainer − sampled`` and ``ρ = exp(lr)``.

    The formulas and clamps (±20) are those of ``rollout_service.correction``; docs/mismatch.md explains them.
    """

    version: int
    replica_id: str | None
    """The replica that sampled the tokens; None: all replicas merged."""
    adapter: str | None = None
    """The adapter that sampled the tokens, with ``version`` of the model; None: none."""
    adapter_version: int | None = None
    tokens: int
    sequences: int
    """Sequences that one version sampled from end to end; ``chi2_seq`` covers these."""
    k1: float
    """mean(−lr), nats per token."""
    k3: float
    """mean(ρ − 1 − lr), nats per token."""
    chi2_token: float
    """mean(ρ²) − 1."""
    chi2_seq: float | None
    """mean over sequences of (Π ρ)² − 1."""
    ess_ratio: float
    """Effective sample size of the weights min(ρ, C) as a share of the tokens."""
    prob_error: float
    """mean(exp |lr|) ≥ 1, NeMo-RL's token_mult_prob_error."""
    abs_diff_max: float
    """The largest |lr|, in nats."""
    outside_ratio: float
    """Share of tokens with ρ outside [1/C, C]."""
    quantiles: dict[float, float]
    """Quantiles of |lr| in nats, by rank; estimated with a sketch."""
    kv_ages: tuple[KVAgeRow, ...] = ()
    """The same tokens by the age of their keys and values, lowest age first. See ``Span.kv_from``."""
    suspect_since: float | None = None
    """Unix time in seconds since when a threshold is exceeded; for merged rows, that of the first replica."""


class NotJudged(Frozen):
    """Reported tokens that are in no row, because truncated sampling changed their logprobs."""

    version: int
    replica_id: str
    adapter: str | None = None
    adapter_version: int | None = None
    tokens: int


class MismatchTable(Frozen):
    """All mismatch statistics, oldest version first."""

    rows: tuple[MismatchRow, ...]
    """Rows per version, replica and adapter version."""
    versions: tuple[MismatchRow, ...]
    """The same rows merged over replicas."""
    truncated: tuple[NotJudged, ...] = ()
    """Tokens of truncated rollouts, which are not judged; see docs/correction.md."""
    kv_max_age: int | None = None
    """The maximum age that ``weights.kv_max_age: auto`` has chosen for the newest update; None: it is not set to auto,
    or there was no update."""


class MismatchReceipt(Frozen):
    """The result of a trainer's report."""

    tokens: int
    """Number of tokens counted, without masked ones."""
    too_old_tokens: int = 0
    """Number of these tokens whose versions are no longer kept: they are in no row."""
    truncated_tokens: int = 0
    """Number of further tokens that truncated sampling generated: in no row, and not judged."""
    repeated: bool = False
    """True if a report of this name was counted before; this one was not counted."""
