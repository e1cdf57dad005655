"""Declarations of every metric of the service. ``scripts/reference.py`` generates docs/metrics.md from these tables,
and tests compare both with the metrics that a running service exports.

Prometheus' conventions: seconds, bytes and ratios; counters end in ``_total``. No label is unbounded: no request ids,
and only versions that are on disk, staged, served or among the newest measured.
"""

from functools import partial
from typing import Literal

from rollout_service.protocol.base import Frozen

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["process", "service", "vllm", "serve"]

_PREFIXES: dict[Source, str] = {
    "process": "ray_rollout_",
    "service": "rollout_",
    "vllm": "ray_vllm_",
    "serve": "ray_serve_",
}
_LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_UPDATE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metric(Frozen):
    """One metric."""

    name: str
    """Name in Prometheus."""
    kind: Kind
    source: Source
    """``process``: counted by each process of ours and exported by its node's Ray agent. ``service``: state of the
    whole service, at its ``GET /metrics``. ``vllm``, ``serve``: their own metrics, exported by the Ray agents."""
    description: str
    labels: tuple[str, ...] = ()
    """Labels without those that Ray adds: see docs/metrics.md."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


def _metric(
    source: Source,
    name: str,
    description: str,
    labels: tuple[str, ...] = (),
    *,
    buckets: tuple[float, ...] = (),
    kind: Kind | None = None,
) -> Metric:
    """``kind``: None: a counter if its name ends in ``_total``, a histogram if it has buckets, otherwise a gauge."""
    return Metric(
        name=_PREFIXES[source] + name,
        kind=kind or ("counter" if name.endswith("_total") else "histogram" if buckets else "gauge"),
        source=source,
        description=description,
        labels=labels,
        buckets=buckets,
    )


_process, _service = partial(_metric, "process"), partial(_metric, "service")
_vllm, _serve = partial(_metric, "vllm"), partial(_metric, "serve")

# --- gateway: one request is one prompt, with its n completions

REQUESTS = _process(
    "requests_total",
    "Prompts by how they ended: ok, cancelled by the client, or the class of the error in errors.py.",
    ("outcome",),
)
TIME_TO_LAST_TOKEN = _process(
    "time_to_last_token_seconds",
    "From a prompt's arrival at the gateway to its last token, waits included.",
    buckets=_LATENCY_S,
)
COMPLETIONS = _process("completions_total", "Completions given to clients: stop, length or abort.", ("finish_reason",))
MIXED_COMPLETIONS = _process("mixed_completions_total", "Completions that more than one weight version sampled.")
PROMPT_TOKENS = _process("prompt_tokens_total", "Tokens of answered prompts, each prompt once.")
COMPLETION_TOKENS = _process("completion_tokens_total", "Tokens given to clients. vLLM counts all that it made.")
QUEUE_SEQUENCES = _process("queue_sequences", "Sequences that wait in a gateway for room; a request counts n.")
REFUSALS = _process(
    "refusals_total",
    "Refusals by a replica: Overloaded, KVCacheFull (sessions), TooEarly (weight version) or NotReady; the "
    "gateway asks again.",
    ("reason",),
)
CONTINUATIONS = _process(
    "continuations_total",
    "Attempts after the first: abort (cut short by an update or pause) or lost (the replica died).",
    ("cause",),
)
SESSION_TURNS = _process(
    "session_turns_total", "Turns of sessions: first, continued, or why a branch began (docs/agents.md).", ("start",)
)

# --- engine replica

UPDATES = _process(
    "updates_total",
    "Versions that a replica loaded: ok, unreadable (the previous one stays), or failed (it is replaced).",
    ("outcome",),
)
UPDATE_SECONDS = _process(
    "update_seconds",
    "A replica's time for a version: stage (while it serves), closed (pause to resume), load (the part in vLLM).",
    ("stage",),
    buckets=_UPDATE_S,
)
UPDATE_BYTES = _process("update_bytes_total", "Bytes of the versions that a replica loaded.")

SEQUENCES = _process(
    "sequences",
    "Sequences in an engine, running or waiting, as the autoscaler sees them; also while it idles.",
    ("state",),
)
KV_USAGE = _process("kv_usage_ratio", "Share of the KV cache's blocks that sequences hold.")
DECODE_KV_TOKENS = _process(
    "decode_kv_tokens_total",
    "KV tokens that decode steps attend to, of one layer, with group attention (docs/group_attention.md).",
)
DECODE_KV_TOKENS_SPARED = _process(
    "decode_kv_tokens_spared_total", "Of these, tokens that were read once for several sequences."
)

# --- ingest

UPLOAD_PARTS = _process("upload_parts_total", "Parts received and checked.")
UPLOAD_BYTES = _process("upload_bytes_total", "Bytes of these parts.")
VERSIONS_RECEIVED = _process(
    "versions_received_total",
    "Committed versions by transport: parts, delta, path, broadcast, shared_memory or cuda_ipc.",
    ("transport",),
)
RECEIVED_BYTES = _process(
    "received_bytes_total", "Bytes that these versions came as; of a delta, its changes.", ("transport",)
)
RECEIVED_VERSION_BYTES = _process(
    "received_version_bytes_total", "Bytes of these versions as they are stored.", ("transport",)
)
RECEIVED_SECONDS = _process(
    "received_seconds",
    "Time until a version was stored, by overlapping stage: receive, quantize, store, finish (last tensor "
    "until all are stored).",
    ("transport", "stage"),
    buckets=_UPDATE_S,
)
QUANTIZE_SECONDS = _process("quantize_seconds_total", "Time for reading, quantizing and writing tensors.")
QUANTIZE_BYTES = _process("quantize_bytes_total", "Bytes of these tensors, as the trainer sent them.")
COMMITS = _process(
    "commits_total",
    "Commits, also repeated ones and version 0: ok, or the class of the error in errors.py.",
    ("outcome",),
)
COMMIT_SECONDS = _process(
    "commit_seconds", "From a commit's beginning until the version is the newest.", buckets=_UPDATE_S
)

# --- state of the whole

LATEST_VERSION = _service("latest_version", "The newest committed version.")
LATEST_COMMITTED = _service("latest_version_committed_timestamp_seconds", "When it was committed, in Unix time.")
PAUSED = _service("paused", "1 while the operator wants the fleet paused.")
REPLICAS = _service("replicas", "Live replicas by state, without pinned ones.", ("state",))
REPLICAS_MIN = _service("replicas_min", "scaling.min_replicas.")
REPLICAS_MAX = _service("replicas_max", "scaling.max_replicas.")
REPLICA_STARTS = _service("replica_starts_total", "Replicas that came since the ingest started.")
REPLICA_FAILURES = _service("replica_failures_total", "Replicas that failed, or went without a drain.")
REPLICA_VERSION = _service("replica_version", "The version that a replica serves.", ("replica",))
STALENESS_VERSIONS = _service(
    "replica_staleness_versions", "How far its version's number is below the newest's.", ("replica",)
)
STALENESS_SECONDS = _service(
    "replica_staleness_seconds",
    "How long a version newer than its own has been committed; 0 at the newest.",
    ("replica",),
)
REPLICA_STATE = _service("replica_state", "1 at the state it is in, 0 at the others.", ("replica", "state"))
REPLICA_ERROR = _service("replica_error", "1 if it reports an error.", ("replica",))
REPLICA_PAUSED = _service("replica_paused", "1 if it has obeyed a pause.", ("replica",))
REPLICA_SEQUENCES = _service("replica_sequences", "Sequences it has admitted and not answered.", ("replica",))
ADAPTER_REPLICAS = _service("adapter_replicas", "Replicas that hold a version of an adapter.", ("adapter", "version"))
ADAPTER_ROLLOUTS = _service("adapter_rollouts", "Rollouts that it samples now.", ("adapter", "version"))
REPLICA_REPORT_AGE = _service("replica_report_age_seconds", "Since its last report.", ("replica",))
REPLICA_UPDATE_SECONDS = _service(
    "replica_update_seconds", "Its last update, by stage as in ray_rollout_update_seconds.", ("replica", "stage")
)
REPLICA_UPDATE_BYTES = _service(
    "replica_update_bytes", "Bytes of the version that it serves, while that is on disk.", ("replica",)
)
VERSION_STATE = _service(
    "version_state", "1 at its state: staged, committed, or live on every replica.", ("version", "state")
)
VERSION_BYTES = _service("version_bytes", "Bytes of its tensors, as stored or to come.", ("version",))
VERSION_COMMITTED = _service(
    "version_committed_timestamp_seconds", "When it was committed, in Unix time.", ("version",)
)
STAGED_UPLOADS = _service("staged_uploads", "Versions begun and not committed.")
STAGED_MISSING = _service("staged_missing_parts", "Parts that a staged version still lacks.", ("version",))
STAGED_FAILED = _service(
    "staged_failed", "1 if it cannot be committed: a tensor could not be converted or stored.", ("version",)
)
LOG_BYTES = _service("log_bytes", "Size of all files below weights.root.")
LOG_FREE_BYTES = _service("log_free_bytes", "Free bytes on that disk.")

# --- the KV cache and its scales: docs/kv_scales.md

KV_CACHE_FP8 = _service(
    "kv_cache_fp8", "1: it keeps keys and values in FP8; 0: in BF16. GET /v1/fleet says why.", ("replica",)
)
KV_SATURATED = _service(
    "kv_saturated_ratio",
    "Share of a layer's k or v beyond FP8's range, by the replica that measured, until other scales come.",
    ("replica", "layer", "tensor"),
)
KV_UNFIT = _service(
    "kv_unfit_layers", "Layers for which FP8 is not accurate enough. GET /v1/fleet names them.", ("replica",)
)

# --- mismatch, per version, replica and adapter (run-a@3; empty: none); lr = the trainer's - the sampled logprob

_ROW = ("version", "replica", "adapter")
MISMATCH_TOKENS = _service("mismatch_tokens_total", "Tokens measured.", _ROW)
MISMATCH_TRUNCATED = _service(
    "mismatch_truncated_tokens_total",
    "Reported tokens of rollouts with truncated sampling, which are in no other row.",
    _ROW,
)
MISMATCH_SEQUENCES = _service("mismatch_sequences_total", "Measured completions of one version.", _ROW)
MISMATCH_K1 = _service("mismatch_k1", "mean(-lr): KL of engine against trainer, unbiased, signed.", _ROW)
MISMATCH_K3 = _service(
    "mismatch_k3", "mean(exp(lr) - 1 - lr): the same KL, never negative and less noisy. Above 0.01 be careful.", _ROW
)
MISMATCH_CHI2 = _service("mismatch_chi2", "mean(exp(2 lr)) - 1, over tokens: the variance of importance weights.", _ROW)
MISMATCH_ESS = _service(
    "mismatch_ess_ratio", "Effective sample size of truncated weights as a share of the tokens: 1 is on-policy.", _ROW
)
MISMATCH_PROB_ERROR = _service(
    "mismatch_prob_error",
    "mean(exp |lr|), the token multiplicative probability error: 1 is none, above 1.05 is suspect.",
    _ROW,
)
MISMATCH_MAX = _service("mismatch_abs_diff_max", "Largest |lr| seen.", _ROW)
MISMATCH_OUTSIDE = _service(
    "mismatch_ratio_outside", "Share of tokens with exp(lr) outside [1/C, C]: what TIS clips.", _ROW
)
MISMATCH_ABS_DIFF = _service(
    "mismatch_abs_diff", "|lr| at the quantiles 0.5, 0.9, 0.99 and 0.999.", (*_ROW, "quantile")
)
MISMATCH_AGE_TOKENS = _service(
    "mismatch_kv_age_tokens", "Measured tokens by the age of their keys and values, in versions.", ("kv_age",)
)
MISMATCH_AGE_K3 = _service("mismatch_kv_age_k3", "k3 of these tokens.", ("kv_age",))
MISMATCH_AGE_PROB_ERROR = _service("mismatch_kv_age_prob_error", "Probability error of these tokens.", ("kv_age",))
VERSION_SUSPECT = _service("version_suspect", "1 if the mismatch is above a threshold.", _ROW)
SUSPECT_SINCE = _service("version_suspect_timestamp_seconds", "Since when, in Unix time.", _ROW)

# --- theirs, of which dashboards and docs speak; many more are exported

VLLM = (
    _vllm("num_requests_running", "Sequences in the running batch; gone 20 s after the last step."),
    _vllm("num_requests_waiting", "Sequences that wait for a place in it."),
    _vllm("kv_cache_usage_perc", "Share of KV blocks in use."),
    _vllm("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _vllm("prefix_cache_hits_total", "Prompt tokens found there: prefill saved."),
    _vllm("num_preemptions_total", "Sequences evicted from the KV cache and recomputed."),
    _vllm("prompt_tokens_total", "Prompt tokens prefilled."),
    _vllm("generation_tokens_total", "Tokens sampled, also of discarded completions."),
    _vllm("request_success_total", "Sequences that ended, by finished_reason.", ("finished_reason",)),
    _vllm("request_queue_time_seconds", "From arrival in the engine to the first step.", kind="histogram"),
    _vllm("time_to_first_token_seconds", "From arrival in the engine to the first token.", kind="histogram"),
    _vllm("request_time_per_output_token_seconds", "Mean time between a sequence's tokens.", kind="histogram"),
    _vllm("e2e_request_latency_seconds", "From arrival in the engine to the last token.", kind="histogram"),
)
SERVE = (
    _serve("autoscaling_target_replicas", "Replicas that Serve is to have. Actual engines: rollout_replicas."),
    _serve("deployment_replica_starts_total", "Replicas started, restarts included."),
    _serve("deployment_replica_healthy", "1 while a replica's health check passes."),
    _serve("deployment_queued_queries", "Calls that wait in a handle for a replica."),
    _serve("num_http_requests_total", "HTTP requests, by route, method and status_code."),
)

OURS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric that this project exports."""
METRICS = OURS + VLLM + SERVE
"""All of the above."""
