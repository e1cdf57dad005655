"""The nouns of the service. Importing this pulls in neither torch, vllm nor ray.

All are frozen pydantic models: the gateway validates with them, the client parses with them, and they cross
process borders as plain JSON.
"""

import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]
OnAbort = Literal["continue", "return"]
ReplicaState = Literal["starting", "syncing", "ready", "stale", "draining", "failed"]
VersionState = Literal["staged", "committed", "live"]
KVScalesFrom = Literal["trainer", "calibrate", "reuse", "unit"]
MismatchSource = Literal["trainer", "shadow"]


MAX_VERSION = 2**53 - 1
"""Weight versions are JSON numbers and values of metrics, which others read as doubles: beyond this those are not exact
(RFC 8259, section 6)."""


class Frozen(BaseModel):
    """Base of every noun: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


WeightVersion = Annotated[int, Field(ge=0, le=MAX_VERSION)]
"""A weight version that comes from outside."""


class Span(Frozen):
    """Output tokens ``[start, end)`` of one completion were sampled by the weights of ``version`` on one replica."""

    version: WeightVersion
    start: int = Field(ge=0)
    end: int
    replica_id: str | None = None
    """The replica that sampled them; None: the rollout's."""

    @model_validator(mode="after")
    def _not_empty(self) -> "Span":
        if self.end <= self.start:
            raise ValueError(f"span [{self.start}, {self.end}) is empty")
        return self


class Completion(Frozen):
    """One sampled continuation of a prompt.

    ``logprobs[i]`` is the natural log-probability of ``token_ids[i]`` under the distribution it was sampled from
    (vLLM's ``processed_logprobs``: after temperature, penalties and truncation). Always finite.
    """

    index: int = Field(ge=0)
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    spans: tuple[Span, ...]
    text: str | None = None
    packed_sampling_mask: tuple[str, ...] | None = None
    """Which tokens each token was drawn from, in the chunks of ``rollout_service.sampling_mask``; None unless
    ``engine.return_sampling_mask`` is set."""

    @model_validator(mode="after")
    def _aligned(self) -> "Completion":
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs")
        position = 0
        for span in self.spans:
            if span.start != position:
                raise ValueError(f"spans {self.spans} leave a gap at token {position}")
            position = span.end
        if position != len(self.token_ids):
            raise ValueError(f"spans {self.spans} do not cover {len(self.token_ids)} tokens")
        return self

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that made this completion, in the order they were live."""
        return tuple(version for version, _ in itertools.groupby(span.version for span in self.spans))


class Rollout(Frozen):
    """One prompt's ``n`` completions. Which replica made which token stands in their spans."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    replica_id: str
    """The replica that ended the most interrupted completion: of a rollout that was not interrupted, the only one."""
    attempts: int = Field(default=1, ge=1)
    """How many replicas' generations the most interrupted completion took; 1: nothing was in its way."""
    truncated_sampling: bool = False
    """Sampled from a part of the vocabulary (``top_p``, ``top_k``, ``min_p``, ``min_tokens``), over which the logprobs
    are renormalized: they do not compare with those of the whole vocabulary, and the monitor does not judge them."""


class UpdateTimings(Frozen):
    """Seconds that one replica spent on one weight version, by stage."""

    stage_s: float
    """Reading and checking the bytes while the replica still served."""
    closed_s: float
    """From pause to resume: no token was made in this time."""
    load_s: float
    """The part of ``closed_s`` that vLLM spent loading."""


class KVCacheChoice(Frozen):
    """What the KV cache is kept in, and why."""

    dtype: Literal["fp8_e4m3", "bfloat16"]
    why: str
    judged_by: str = ""
    """The replica and version that were measured; empty: it was not measured, but configured."""


class KVCacheStatus(Frozen):
    """The KV cache of one replica."""

    choice: KVCacheChoice
    saturated: dict[str, tuple[float | None, float | None]] = {}
    """Layer → share of k, of v beyond the largest code, with the scales that it serves with; as last measured. None:
    not a number, as k or v was."""
    measured_version: int | None = None
    """The version that was measured; None: none yet, by this replica."""
    measured_s: float | None = None
    """How long that took, in which the replica was closed."""
    unfit: dict[str, str] = {}
    """Layer → why FP8 cannot serve its k and v, as last measured."""


class ReplicaStatus(Frozen):
    """What one live engine replica last said of itself."""

    replica_id: str
    sequence: int = 0
    """Grows with each report of a replica, so that one overtaken on its way is not taken for news."""
    version: int | None
    """The version it serves; None until it has loaded its first."""
    digest: str | None = None
    """What the log said of that version when it was loaded: a log that is restored from a backup may give its number to
    other weights."""
    log: str | None = None
    """The log that it follows, by the name in its file ORIGIN."""
    state: ReplicaState
    target: int | None = None
    """The version it is staging or loading right now."""
    paused: bool = False
    """A pause was asked for, and nothing runs any more."""
    obeyed: str = ""
    """The pause or resume that it has obeyed last; while running rollouts are waited for, still the one before."""
    running: int = 0
    """Sequences accepted and not yet answered."""
    error: str | None = None
    update: UpdateTimings | None = None
    """Timings of its last update."""
    kv_cache: KVCacheStatus | None = None
    """None until its engine runs."""
    age_s: float = 0.0
    """Seconds since it last reported."""


class Failure(Frozen):
    """An error that was kept to be shown."""

    type: str
    """Class in ``rollout_service.errors``."""
    message: str


class Suspicion(Frozen):
    """Why a version is suspect: what one replica sampled with it lies too far from what scored it."""

    replica_id: str
    source: MismatchSource
    since: float
    """Unix time, in seconds."""
    tokens: int
    """Tokens measured so far; ``k3`` and ``prob_error`` as in MismatchRow."""
    k3: float
    prob_error: float


class WeightStatus(Frozen):
    """State of one weight version, from upload to live."""

    version: int
    state: VersionState
    """``live``: every live replica serves this version or a newer one."""
    digest: str | None = None
    """xxh3-128 over the manifest, KV scales included once they are known; None while staged."""
    total_bytes: int = 0
    kv_scales_from: KVScalesFrom | None = None
    """Where the scales of its FP8 KV cache come from, see docs/kv_scales.md; None while staged."""
    missing_parts: tuple[int, ...] = ()
    """Parts that a staged upload still lacks."""
    error: Failure | None = None
    """Why a staged version cannot be committed: mend the weights and begin it anew. Or what the disk did not confirm of
    a committed one."""
    replicas: tuple[ReplicaStatus, ...] = ()
    suspect: tuple[Suspicion, ...] | None = None
    """Replicas on which its mismatch is above a threshold of ``monitor``; None: not asked, or the monitor is away."""


class FailedStart(Frozen):
    """A replica that ended before it served."""

    replica_id: str
    reason: str
    """What failed and what caused it, the deepest last."""
    at: float
    """Unix time, in seconds."""


class FailedStarts(Frozen):
    """The last series of starts that failed, one after the other."""

    tries: int
    first: FailedStart
    last: FailedStart
    over: bool
    """A replica has served its first version since."""


class Fleet(Frozen):
    """The table of live replicas beside the newest committed version."""

    latest_version: int
    paused: bool
    replicas: tuple[ReplicaStatus, ...]
    failed_starts: FailedStarts | None = None
    """None: no start failed since the ingest started."""


class MismatchRow(Frozen):
    """How far sampled tokens were from what scored them, with ``lr = scored − sampled`` and ``ρ = exp(lr)``.

    Formulas and clamps (±20) are those of ``rollout_service.correction``; docs/mismatch.md says what they mean.
    """

    version: int
    replica_id: str | None
    """The replica that sampled them; None: all replicas merged."""
    source: MismatchSource
    """Who scored them."""
    tokens: int
    sequences: int
    """Sequences that one version sampled from end to end: ``chi2_seq`` is over them."""
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
    """|lr| in nats, by rank; from a sketch."""
    suspect_since: float | None = None
    """Unix time in seconds since when a threshold is passed; of merged rows, the first replica's."""


class NotJudged(Frozen):
    """Reported tokens that are in no row, because truncated sampling made their logprobs."""

    version: int
    replica_id: str
    source: MismatchSource
    tokens: int


class MismatchTable(Frozen):
    """What is known of the mismatch, oldest version first."""

    rows: tuple[MismatchRow, ...]
    """Per version, replica and source."""
    versions: tuple[MismatchRow, ...]
    """The same merged over replicas."""
    truncated: tuple[NotJudged, ...] = ()
    """What was reported of truncated rollouts, which nobody judges; see docs/correction.md."""


class MismatchReceipt(Frozen):
    """What became of a trainer's report."""

    tokens: int
    """Tokens that were counted, masked ones not."""
    too_old_tokens: int = 0
    """Tokens among them of versions that are not kept any more: they are in no row."""
    truncated_tokens: int = 0
    """Tokens beside them that truncated sampling made: in no row, and not judged."""
    repeated: bool = False
    """A report of this name was counted before, and this one was not."""
