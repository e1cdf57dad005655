"""Declarations of every metric of the service. ``scripts/reference.py`` generates docs/metrics.md from these tables,
and tests compare both with the metrics that a running service exports.

Prometheus' conventions: seconds, bytes and ratios; counters end in ``_total``. No label is unbounded: no request ids,
and only versions that are on disk, staged, served or among the newest measured.
"""

from typing import Literal

from rollout_service.protocol.base import Frozen

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["seconds", "bytes", "ratio", "tokens", "versions", "nats", ""]
Source = Literal["process", "service", "vllm", "serve"]

_LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_UPDATE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metric(Frozen):
    """One metric."""

    name: str
    """Name in Prometheus."""
    kind: Kind
    unit: Unit
    """Base unit of the value; empty: a number without one."""
    source: Source
    """``process``: counted by each process of ours and exported by its node's Ray agent. ``service``: state of the
    whole service, at its ``GET /metrics``. ``vllm``, ``serve``: their own metrics, exported by the Ray agents."""
    description: str
    labels: tuple[str, ...] = ()
    """Labels without those that Ray adds: see docs/metrics.md."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


def _process(
    name: str, kind: Kind, unit: Unit, labels: tuple[str, ...], description: str, buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(
        name=f"ray_rollout_{name}",
        kind=kind,
        unit=unit,
        source="process",
        description=description,
        labels=labels,
        buckets=buckets,
    )


def _service(name: str, kind: Kind, unit: Unit, labels: tuple[str, ...], description: str) -> Metric:
    return Metric(
        name=f"rollout_{name}", kind=kind, unit=unit, source="service", description=description, labels=labels
    )


# --- gateway: one request is one prompt, with its n completions

REQUESTS = _process(
    "requests_total", "counter", "", ("outcome",),
    "Prompts by how they ended: ok, cancelled by the client, or the class of the error in errors.py.",
)  # fmt: skip
TIME_TO_LAST_TOKEN = _process(
    "time_to_last_token_seconds", "histogram", "seconds", (),
    "From a prompt's arrival at the gateway to its last token, waits included.",
    _LATENCY_S,
)  # fmt: skip
COMPLETIONS = _process(
    "completions_total", "counter", "", ("finish_reason",), "Completions given to clients: stop, length or abort."
)
MIXED_COMPLETIONS = _process(
    "mixed_completions_total", "counter", "", (), "Completions that more than one weight version sampled."
)
PROMPT_TOKENS = _process(
    "prompt_tokens_total", "counter", "tokens", (), "Tokens of answered prompts, each prompt once."
)
COMPLETION_TOKENS = _process(
    "completion_tokens_total", "counter", "tokens", (),
    "Tokens given to clients. vLLM counts all that it made.",
)  # fmt: skip
QUEUE_SEQUENCES = _process(
    "queue_sequences", "gauge", "", (),
    "Sequences that wait in a gateway for room; a request counts n.",
)  # fmt: skip
REFUSALS = _process(
    "refusals_total", "counter", "", ("reason",),
    "Refusals by a replica: Overloaded, KVCacheFull (sessions), TooEarly (weight version) or NotReady; the gateway "
    "asks again.",
)  # fmt: skip
CONTINUATIONS = _process(
    "continuations_total", "counter", "", ("cause",),
    "Attempts after the first: abort (cut short by an update or pause) or lost (the replica died).",
)  # fmt: skip
SESSION_TURNS = _process(
    "session_turns_total", "counter", "", ("start",),
    "Turns of sessions: first, continued, or why a branch began (docs/agents.md).",
)  # fmt: skip

# --- engine replica

UPDATES = _process(
    "updates_total", "counter", "", ("outcome",),
    "Versions that a replica loaded: ok, unreadable (the previous one stays), or failed (it is replaced).",
)  # fmt: skip
UPDATE_SECONDS = _process(
    "update_seconds", "histogram", "seconds", ("stage",),
    "A replica's time for a version: reading (while it serves), closed (pause to resume), load (the part in vLLM).",
    _UPDATE_S,
)  # fmt: skip
UPDATE_BYTES = _process("update_bytes_total", "counter", "bytes", (), "Bytes of the versions that a replica loaded.")

SEQUENCES = _process(
    "sequences", "gauge", "", ("state",),
    "Sequences in an engine, running or waiting, as the autoscaler sees them; also while it idles.",
)  # fmt: skip
KV_USAGE = _process("kv_usage_ratio", "gauge", "ratio", (), "Share of the KV cache's blocks that sequences hold.")
DECODE_KV_TOKENS = _process(
    "decode_kv_tokens_total", "counter", "tokens", (),
    "KV tokens that decode steps attend to, of one layer, with group attention (docs/group_attention.md).",
)  # fmt: skip
DECODE_KV_TOKENS_SPARED = _process(
    "decode_kv_tokens_spared_total", "counter", "tokens", (),
    "Of these, tokens that were read once for several sequences.",
)  # fmt: skip

# --- ingest

UPLOAD_PARTS = _process("upload_parts_total", "counter", "", (), "Parts received and checked.")
UPLOAD_BYTES = _process("upload_bytes_total", "counter", "bytes", (), "Bytes of these parts.")
VERSIONS_RECEIVED = _process(
    "versions_received_total", "counter", "", ("transport",),
    "Committed versions by transport: parts, delta, path, broadcast, shared_memory or cuda_ipc.",
)  # fmt: skip
RECEIVED_BYTES = _process(
    "received_bytes_total", "counter", "bytes", ("transport",),
    "Bytes that these versions came as; of a delta, its changes.",
)  # fmt: skip
RECEIVED_VERSION_BYTES = _process(
    "received_version_bytes_total", "counter", "bytes", ("transport",),
    "Bytes of these versions as they are stored.",
)  # fmt: skip
RECEIVED_SECONDS = _process(
    "received_seconds", "histogram", "seconds", ("transport", "stage"),
    "Time until a version was stored, by overlapping stage: receive, quantize, store, finish (last tensor "
    "until all are stored).",
    _UPDATE_S,
)  # fmt: skip
QUANTIZE_SECONDS = _process(
    "quantize_seconds_total", "counter", "seconds", (),
    "Time for reading, quantizing and writing tensors.",
)  # fmt: skip
QUANTIZE_BYTES = _process(
    "quantize_bytes_total", "counter", "bytes", (), "Bytes of these tensors, as the trainer sent them."
)
COMMITS = _process(
    "commits_total",
    "counter",
    "",
    ("outcome",),
    "Commits, also repeated ones and version 0: ok, or the class of the error in errors.py.",
)
COMMIT_SECONDS = _process(
    "commit_seconds", "histogram", "seconds", (),
    "From a commit's beginning until the version is the newest.",
    _UPDATE_S,
)  # fmt: skip

# --- state of the whole

LATEST_VERSION = _service("latest_version", "gauge", "versions", (), "The newest committed version.")
LATEST_COMMITTED = _service(
    "latest_version_committed_timestamp_seconds", "gauge", "seconds", (), "When it was committed, in Unix time."
)
PAUSED = _service("paused", "gauge", "", (), "1 while the operator wants the fleet paused.")
REPLICAS = _service("replicas", "gauge", "", ("state",), "Live replicas by state.")
REPLICAS_MIN = _service("replicas_min", "gauge", "", (), "scaling.min_replicas.")
REPLICAS_MAX = _service("replicas_max", "gauge", "", (), "scaling.max_replicas.")
REPLICA_STARTS = _service("replica_starts_total", "counter", "", (), "Replicas that came since the ingest started.")
REPLICA_FAILURES = _service(
    "replica_failures_total", "counter", "", (),
    "Replicas that failed, or went without a drain.",
)  # fmt: skip
REPLICA_VERSION = _service("replica_version", "gauge", "versions", ("replica",), "The version that a replica serves.")
STALENESS_VERSIONS = _service(
    "replica_staleness_versions", "gauge", "versions", ("replica",),
    "How far its version's number is below the newest's.",
)  # fmt: skip
STALENESS_SECONDS = _service(
    "replica_staleness_seconds", "gauge", "seconds", ("replica",),
    "How long a version newer than its own has been committed; 0 at the newest.",
)  # fmt: skip
REPLICA_STATE = _service(
    "replica_state", "gauge", "", ("replica", "state"), "1 at the state it is in, 0 at the others."
)
REPLICA_ERROR = _service("replica_error", "gauge", "", ("replica",), "1 if it reports an error.")
REPLICA_PAUSED = _service("replica_paused", "gauge", "", ("replica",), "1 if it has obeyed a pause.")
REPLICA_SEQUENCES = _service(
    "replica_sequences", "gauge", "", ("replica",),
    "Sequences it has admitted and not answered.",
)  # fmt: skip
ADAPTER_REPLICAS = _service(
    "adapter_replicas", "gauge", "", ("adapter", "version"),
    "Replicas that hold a version of an adapter.",
)  # fmt: skip
ADAPTER_ROLLOUTS = _service(
    "adapter_rollouts", "gauge", "", ("adapter", "version"),
    "Rollouts that it samples now.",
)  # fmt: skip
REPLICA_REPORT_AGE = _service(
    "replica_report_age_seconds", "gauge", "seconds", ("replica",),
    "Since its last report.",
)  # fmt: skip
REPLICA_UPDATE_SECONDS = _service(
    "replica_update_seconds", "gauge", "seconds", ("replica", "stage"),
    "Its last update, by stage as in ray_rollout_update_seconds.",
)  # fmt: skip
REPLICA_UPDATE_BYTES = _service(
    "replica_update_bytes",
    "gauge",
    "bytes",
    ("replica",),
    "Bytes of the version that it serves, while that is on disk.",
)
VERSION_STATE = _service(
    "version_state", "gauge", "", ("version", "state"),
    "1 at its state: staged, committed, or live on every replica.",
)  # fmt: skip
VERSION_BYTES = _service("version_bytes", "gauge", "bytes", ("version",), "Bytes of its tensors, as stored or to come.")
VERSION_COMMITTED = _service(
    "version_committed_timestamp_seconds", "gauge", "seconds", ("version",), "When it was committed, in Unix time."
)
STAGED_UPLOADS = _service("staged_uploads", "gauge", "", (), "Versions begun and not committed.")
STAGED_MISSING = _service("staged_missing_parts", "gauge", "", ("version",), "Parts that a staged version still lacks.")
STAGED_FAILED = _service(
    "staged_failed",
    "gauge",
    "",
    ("version",),
    "1 if it cannot be committed: a tensor could not be converted or stored.",
)
LOG_BYTES = _service("log_bytes", "gauge", "bytes", (), "Size of all files below weights.root.")
LOG_FREE_BYTES = _service("log_free_bytes", "gauge", "bytes", (), "Free bytes on that disk.")

# --- the KV cache and its scales: docs/kv_scales.md

KV_CACHE_FP8 = _service(
    "kv_cache_fp8", "gauge", "", ("replica",),
    "1: it keeps keys and values in FP8; 0: in BF16. GET /v1/fleet says why.",
)  # fmt: skip
KV_SATURATED = _service(
    "kv_saturated_ratio", "gauge", "ratio", ("replica", "layer", "tensor"),
    "Share of a layer's k or v beyond FP8's range, by the replica that measured.",
)  # fmt: skip
KV_UNFIT = _service(
    "kv_unfit_layers", "gauge", "", ("replica",),
    "Layers for which FP8 is not accurate enough. GET /v1/fleet names them.",
)  # fmt: skip

# --- mismatch, per version, replica and adapter (run-a@3; empty: none); lr = the trainer's - the sampled logprob

_ROW = ("version", "replica", "adapter")
MISMATCH_TOKENS = _service("mismatch_tokens_total", "counter", "tokens", _ROW, "Tokens measured.")
MISMATCH_TRUNCATED = _service(
    "mismatch_truncated_tokens_total", "counter", "tokens", _ROW,
    "Reported tokens of rollouts with truncated sampling, which are in no other row.",
)  # fmt: skip
MISMATCH_SEQUENCES = _service("mismatch_sequences_total", "counter", "", _ROW, "Measured completions of one version.")
MISMATCH_K1 = _service(
    "mismatch_k1", "gauge", "nats", _ROW, "mean(-lr): KL of engine against trainer, unbiased, signed."
)
MISMATCH_K3 = _service(
    "mismatch_k3", "gauge", "nats", _ROW,
    "mean(exp(lr) - 1 - lr): the same KL, never negative and less noisy. Above 0.01 be careful.",
)  # fmt: skip
MISMATCH_CHI2 = _service(
    "mismatch_chi2", "gauge", "", _ROW, "mean(exp(2 lr)) - 1, over tokens: the variance of importance weights."
)
MISMATCH_ESS = _service(
    "mismatch_ess_ratio", "gauge", "ratio", _ROW,
    "Effective sample size of truncated weights as a share of the tokens: 1 is on-policy.",
)  # fmt: skip
MISMATCH_PROB_ERROR = _service(
    "mismatch_prob_error", "gauge", "ratio", _ROW,
    "mean(exp |lr|), the token multiplicative probability error: 1 is none, above 1.05 is suspect.",
)  # fmt: skip
MISMATCH_MAX = _service("mismatch_abs_diff_max", "gauge", "nats", _ROW, "Largest |lr| seen.")
MISMATCH_OUTSIDE = _service(
    "mismatch_ratio_outside", "gauge", "ratio", _ROW, "Share of tokens with exp(lr) outside [1/C, C]: what TIS clips."
)
MISMATCH_ABS_DIFF = _service(
    "mismatch_abs_diff", "gauge", "nats", (*_ROW, "quantile"), "|lr| at the quantiles 0.5, 0.9, 0.99 and 0.999."
)
MISMATCH_AGE_TOKENS = _service(
    "mismatch_kv_age_tokens", "gauge", "tokens", ("kv_age",),
    "Measured tokens by the age of their keys and values, in versions.",
)  # fmt: skip
MISMATCH_AGE_K3 = _service("mismatch_kv_age_k3", "gauge", "nats", ("kv_age",), "k3 of these tokens.")
MISMATCH_AGE_PROB_ERROR = _service(
    "mismatch_kv_age_prob_error", "gauge", "ratio", ("kv_age",), "Probability error of these tokens."
)
VERSION_SUSPECT = _service(
    "version_suspect", "gauge", "", _ROW,
    "1 if the mismatch is above a threshold.",
)  # fmt: skip
SUSPECT_SINCE = _service("version_suspect_timestamp_seconds", "gauge", "seconds", _ROW, "Since when, in Unix time.")

# --- theirs, of which dashboards and docs speak; many more are exported


def _vllm(name: str, kind: Kind, unit: Unit, description: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"ray_vllm_{name}", kind=kind, unit=unit, source="vllm", description=description, labels=labels)


def _serve(name: str, kind: Kind, unit: Unit, description: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(
        name=f"ray_serve_{name}", kind=kind, unit=unit, source="serve", description=description, labels=labels
    )


VLLM = (
    _vllm("num_requests_running", "gauge", "", "Sequences in the running batch; gone 20 s after the last step."),
    _vllm("num_requests_waiting", "gauge", "", "Sequences that wait for a place in it."),
    _vllm("kv_cache_usage_perc", "gauge", "ratio", "Share of KV blocks in use."),
    _vllm("prefix_cache_queries_total", "counter", "tokens", "Prompt tokens looked up in the prefix cache."),
    _vllm("prefix_cache_hits_total", "counter", "tokens", "Prompt tokens found there: prefill saved."),
    _vllm(
        "num_preemptions_total", "counter", "",
        "Sequences evicted from the KV cache and recomputed.",
    ),
    _vllm("prompt_tokens_total", "counter", "tokens", "Prompt tokens prefilled."),
    _vllm("generation_tokens_total", "counter", "tokens", "Tokens sampled, also of discarded completions."),
    _vllm("request_success_total", "counter", "", "Sequences that ended, by finished_reason.", ("finished_reason",)),
    _vllm("request_queue_time_seconds", "histogram", "seconds", "From arrival in the engine to the first step."),
    _vllm("time_to_first_token_seconds", "histogram", "seconds", "From arrival in the engine to the first token."),
    _vllm(
        "request_time_per_output_token_seconds", "histogram", "seconds",
        "Mean time between a sequence's tokens.",
    ),
    _vllm("e2e_request_latency_seconds", "histogram", "seconds", "From arrival in the engine to the last token."),
)  # fmt: skip
SERVE = (
    _serve(
        "autoscaling_target_replicas", "gauge", "",
        "Replicas that Serve is to have. Actual engines: rollout_replicas.",
    ),
    _serve("deployment_replica_starts_total", "counter", "", "Replicas started, restarts included."),
    _serve("deployment_replica_healthy", "gauge", "", "1 while a replica's health check passes."),
    _serve(
        "deployment_queued_queries", "gauge", "",
        "Calls that wait in a handle for a replica.",
    ),
    _serve("num_http_requests_total", "counter", "", "HTTP requests, by route, method and status_code."),
)  # fmt: skip

OURS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric that this project exports."""
METRICS = OURS + VLLM + SERVE
"""All of the above."""
