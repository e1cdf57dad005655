"""How far the engines are from the trainer, as the monitor tells it; what it is told: ``mismatch_report``."""

from typing import Literal

from rollout_service.protocol.base import Frozen

MismatchSource = Literal["trainer", "shadow"]


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
