"""The mismatch between engines and trainer, as the monitor reports it. Its input is in ``mismatch_report``."""

from rollout_service.protocol.base import Frozen

FIRST_KV_AGE = 1
"""The maximum age of kept keys and values with which ``weights.kv_max_age: auto`` begins."""


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
