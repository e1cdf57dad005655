"""Alert rules for Prometheus: what someone should look at, and what to do then."""

from dataclasses import dataclass

import yaml

GROUP = "rollout-service"


@dataclass(frozen=True)
class Alert:
    """One rule. It fires when ``value`` meets ``condition`` for ``lasting``."""

    name: str
    severity: str
    """``page``: rollouts stop or are wrong now. ``ticket``: within the day."""
    value: str
    """What a healthy service has samples of."""
    condition: str
    """Appended to it; ``absent`` fires when there are no samples."""
    lasting: str
    summary: str
    action: str
    also: str = ""
    """Another expression that makes it fire."""

    @property
    def expr(self) -> str:
        """The rule's expression."""
        expr = f"absent({self.value})" if self.condition == "absent" else f"{self.value} {self.condition}"
        return f"{expr} or {self.also}" if self.also else expr


ALERTS = (
    Alert(
        "RolloutMismatchSuspect", "page",
        "max by (instance, version, adapter, replica) (rollout_version_suspect)", "> 0", "1m",
        "replica {{ $labels.replica }} samples version {{ $labels.version }}"
        "{{ if $labels.adapter }} with adapter {{ $labels.adapter }}{{ end }} too far from the trainer",
        "GET /v1/mismatch?version={{ $labels.version }}: one replica alone is broken, all of them mean the version or "
        "the trainer. Do not train on its rollouts; docs/mismatch.md.",
    ),
    Alert(
        "RolloutEffectiveSampleSizeLow", "ticket",
        "min by (instance, version) (rollout_mismatch_ess_ratio)", "< 0.8", "5m",
        "importance weights leave {{ $value | humanizePercentage }} of version {{ $labels.version }}'s tokens",
        "Rollouts are too stale or precision too low for this policy; dashboard mismatch, row Correction.",
    ),
    Alert(
        "RolloutReplicaStale", "ticket",
        "max by (instance, replica) (rollout_replica_staleness_seconds)", "> 300", "1m",
        "replica {{ $labels.replica }} has been behind the newest version for {{ $value | humanizeDuration }}",
        "GET /v1/fleet has its error. Rollouts with min_weight_version avoid it; if it does not recover, end its "
        "process and Serve replaces it.",
    ),
    Alert(
        "RolloutUpdateFailed", "ticket",
        "max by (instance, replica) (rollout_replica_error "
        'unless on (instance, replica) rollout_replica_state{state="starting"} == 1)', "> 0", "1m",
        "replica {{ $labels.replica }} cannot go to the newest version",
        "GET /v1/fleet has the reason: an unreadable log is tried again, a version that engines cannot load must be "
        "followed by a good one.",
    ),
    Alert(
        "RolloutUploadFailed", "ticket",
        "max by (instance) (rollout_staged_uploads)",
        "> 0 and on (instance) max by (instance) (rollout_staged_failed) > 0", "0m",
        "a staged version cannot be committed",
        "GET /v1/weights has its error: a tensor could not be converted or stored. Discard it and push again.",
    ),
    Alert(
        "RolloutReplicasFailing", "ticket",
        "sum by (instance) (increase(rollout_replica_failures_total[15m]))", "> 2", "0m",
        "{{ $value | humanize }} replicas failed in 15 minutes",
        "The engines' log has the reason: memory, a bad node, or a version that breaks them.",
    ),
    Alert(
        "RolloutNoReadyReplica", "page",
        'sum by (instance) (rollout_replicas{state=~"ready|stale|asleep"})',
        "< 1 and on (instance) max by (instance) (rollout_replicas_min) > 0 unless on (instance) (rollout_replica_state"
        '{state="syncing"} == 1 and on (instance, replica) rollout_replica_staleness_versions)', "2m",
        "no replica takes rollouts",
        "GET /v1/fleet: starting or syncing for longer than an engine takes, see its log; failed, see the reason; none "
        "at all, see what Ray lacks (ray status).",
    ),
    Alert(
        "RolloutServiceAway", "page",
        "rollout_latest_version", "absent", "1m",
        "the service does not answer /metrics, or its ingest is away",
        "Rollouts go on without an ingest, updates do not. See the ingest's log; Serve starts it again by itself.",
        also='up{job="rollout-service"} == 0',
    ),
    Alert(
        "RolloutProcessesUnseen", "ticket",
        "ray_rollout_sequences", "absent", "2m",
        "no engine replica is seen through Ray's metrics agents",
        "Prometheus does not find the agents: see dashboards/prometheus.yml about Ray's discovery file.",
    ),
    Alert(
        "RolloutQueueLong", "ticket",
        'sum by (application) (ray_rollout_sequences{state="waiting"})',
        '> on (application) sum by (application) (ray_rollout_sequences{state="running"})', "10m",
        "more sequences wait in the engines than run",
        "Add replicas (scaling.max_replicas), or ask for less at once.",
    ),
    Alert(
        "RolloutKVSaturated", "ticket",
        "max by (instance, layer, tensor) (rollout_kv_saturated_ratio)", "> 0.01", "5m",
        "{{ $value | humanizePercentage }} of {{ $labels.tensor }} in {{ $labels.layer }} is beyond FP8's range",
        "Its scale is too small. Send scales from the trainer: docs/kv_scales.md.",
    ),
    Alert(
        "RolloutKVUnfit", "ticket",
        "max by (instance) (rollout_kv_unfit_layers)", "> 0", "1m",
        "FP8 is not accurate enough for keys or values of {{ $value }} layers",
        "GET /v1/fleet names them and says why: for scales that are too small, send scales from the trainer; keys that "
        "no scale can save need kv_cache.dtype: bfloat16. Mind the mismatch until then.",
    ),
    Alert(
        "RolloutLogDiskFull", "ticket",
        "min by (instance) (rollout_log_free_bytes)",
        "< 2 * max by (instance) (rollout_version_bytes)", "1m",
        "less than two versions fit on the log's disk",
        "Lower weights.keep_versions, remove what else is on that disk, or give it more.",
    ),
)  # fmt: skip


def rules() -> str:
    """Prometheus' rule file."""
    rendered = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.action},
        }
        for alert in ALERTS
    ]
    head = "# Made by python -m dashboards.generate from dashboards/alerts.py\n"
    return head + yaml.safe_dump({"groups": [{"name": GROUP, "rules": rendered}]}, sort_keys=False, width=120)
