"""The dashboard of the fleet: versions, updates, uploads and autoscaling."""

from dashboards.panels import APPLICATION, ENGINE, REPLICA, SERVICE, Panel, Query, Row
from dashboards.rollout import quantiles, rate

VERSIONS = Row(
    "Versions: who serves what, and how far behind?",
    [
        Panel(
            "Version of each replica",
            "short",
            "Against the newest. A replica that stays below: Replica errors, and GET /v1/fleet, say why.",
            [
                Query(f"max by (replica) (rollout_replica_version{{{REPLICA}}})", "{{replica}}"),
                Query(f"max(rollout_latest_version{{{SERVICE}}})", "newest"),
            ],
            steps=True,
        ),
        Panel(
            "Staleness in versions",
            "short",
            "Trainer steps that a replica is behind, if every step is pushed. Above 1 outside an update, rollouts are "
            "more off-policy than the trainer may expect: use min_weight_version, or find out why updates take longer "
            "than steps.",
            [Query(f"max by (replica) (rollout_replica_staleness_versions{{{REPLICA}}})", "{{replica}}")],
            warn_above=2,
            steps=True,
        ),
        Panel(
            "Staleness in seconds",
            "s",
            "How long a version newer than its own has been committed; 0 at the newest. It should rise for the length "
            "of an update and fall to 0; a line that keeps rising is a replica that is stuck.",
            [Query(f"max by (replica) (rollout_replica_staleness_seconds{{{REPLICA}}})", "{{replica}}")],
            warn_above=300,
        ),
        Panel(
            "Age of the newest version",
            "s",
            "Since its commit: a saw's teeth, as long as a trainer's step. Rising without end: the trainer pushes no "
            "more, or its uploads fail.",
            [
                Query(
                    f"time() - max(rollout_latest_version_committed_timestamp_seconds{{{SERVICE}}})", "since the commit"
                )
            ],
        ),
        Panel(
            "Versions on disk",
            "short",
            "By state. live: on every replica. More committed ones than weights.keep_versions: a replica still serves "
            "an old one.",
            [Query(f"sum by (state) (rollout_version_state{{{SERVICE}}})", "{{state}}")],
            stacked=True,
            steps=True,
        ),
        Panel(
            "Time between commits",
            "s",
            "Commit times of the versions on disk, newest less oldest, per version: a trainer's step as the service "
            "sees it. Near the seconds of an update, replicas do nothing but update.",
            [
                Query(
                    f"(max(rollout_version_committed_timestamp_seconds{{{SERVICE}}}) - "
                    f"min(rollout_version_committed_timestamp_seconds{{{SERVICE}}})) / "
                    f"(count(rollout_version_committed_timestamp_seconds{{{SERVICE}}}) > 1)",
                    "per version",
                )
            ],
        ),
        Panel(
            "Disk of the log",
            "bytes",
            "Files below weights.root, one version's tensors, and what is free. Free below two versions: the next "
            "upload may fail; lower weights.keep_versions or use a larger disk.",
            [
                Query(f"max(rollout_log_bytes{{{SERVICE}}})", "log"),
                Query(f"max(rollout_log_free_bytes{{{SERVICE}}})", "free"),
                Query(f"max(rollout_version_bytes{{{SERVICE}}})", "one version"),
            ],
            logarithmic=True,
        ),
    ],
)

UPDATES = Row(
    "Updates: what does a new version cost a replica?",
    [
        Panel(
            "Last update of each replica",
            "s",
            "stage: reading and checking while it serves. closed: from pause to resume, in which no token is made. "
            "load: the part of closed in which vLLM loads. A closed that is far above load waits for requests to "
            "pause; a long load on a GPU: engine.staging did not find room and reads while closed.",
            [Query(f"max by (replica, stage) (rollout_replica_update_seconds{{{REPLICA}}})", "{{replica}} {{stage}}")],
        ),
        Panel(
            "Updates, p90 by stage",
            "s",
            "Of all replicas in the time of a rate interval; empty between updates. Compare closed with the length of "
            "a trainer's step: their ratio is the share of throughput that updates cost.",
            [
                Query(
                    f"histogram_quantile(0.9, sum by (le, stage) "
                    f"({rate('ray_rollout_update_seconds_bucket', ENGINE)}))",
                    "{{stage}}",
                )
            ],
        ),
        Panel(
            "Updates by outcome",
            "cps",
            "Versions that replicas went to. unreadable: they go on with the version before and try again, look at "
            "the disk or network of the log. failed: half loaded, the replica is replaced; roll back, or push a "
            "good version.",
            [Query(f"sum by (outcome) ({rate('ray_rollout_updates_total', ENGINE)})", "{{outcome}}")],
        ),
        Panel(
            "Bytes loaded",
            "Bps",
            "By all replicas. Several nodes that read one shared file system: its limit shows here, see "
            "weights.root about copies per node.",
            [Query(f"sum({rate('ray_rollout_update_bytes_total', ENGINE)})", "loaded")],
        ),
        Panel(
            "Rate of the last update",
            "Bps",
            "Bytes of a replica's version over the seconds of reading and loading it. Far below the disk's rate: "
            "another process reads there too, or the page cache is too small.",
            [
                Query(
                    f"max by (replica) (rollout_replica_update_bytes{{{REPLICA}}}) / sum by (replica) "
                    f'(rollout_replica_update_seconds{{{REPLICA}, stage=~"stage|load"}})',
                    "{{replica}}",
                )
            ],
        ),
    ],
)

DELTAS = f'{APPLICATION}, transport="delta"'
UPLOADS = Row(
    "Uploads: how do versions come in?",
    [
        Panel(
            "Upload",
            "Bps",
            "Bytes of parts received and checked. Far below the network's rate: one connection only, or the ingest's "
            "disk is the limit.",
            [Query(f"sum({rate('ray_rollout_upload_bytes_total', APPLICATION)})", "received")],
        ),
        Panel(
            "Parts",
            "cps",
            "Parts received per second. Hundreds of them cost more than their bytes: raise weights.part_bytes.",
            [Query(f"sum({rate('ray_rollout_upload_parts_total', APPLICATION)})", "parts")],
        ),
        Panel(
            "Deltas",
            "percentunit",
            "Of versions that came as a delta, the bytes that were sent as a share of the version's. No line: no "
            "trainer sends deltas, or each falls back to sending all; its log says why.",
            [
                Query(
                    f"sum({rate('ray_rollout_received_bytes_total', DELTAS)}) / "
                    f"(sum({rate('ray_rollout_received_version_bytes_total', DELTAS)}) > 0)",
                    "sent",
                )
            ],
        ),
        Panel(
            "Received by transport",
            "Bps",
            "Bytes that versions came as. parts where memory or deltas were expected: the trainer cannot share memory "
            "with the ingest, or too much changes from one version to the next; its log says which.",
            [Query(f"sum by (transport) ({rate('ray_rollout_received_bytes_total', APPLICATION)})", "{{transport}}")],
        ),
        Panel(
            "Seconds of an upload, by transport and stage",
            "s",
            "Medians of the rate interval. receive: until the last tensor had come, at the trainer's pace. quantize, "
            "store: of all threads together. finish: what was left after the last tensor; a long one on a disk is its "
            "sync. Compare cuda_ipc with shared_memory and parts before a trainer is given another way.",
            [
                Query(
                    f"histogram_quantile(0.5, sum by (le, transport, stage) "
                    f"({rate('ray_rollout_received_seconds_bucket', APPLICATION)}))",
                    "{{transport}} {{stage}}",
                )
            ],
        ),
        Panel(
            "Quantizer",
            "Bps",
            "Bytes that went in per second of reading, quantizing and writing. Below the upload's rate the quantizer "
            "is what a commit waits for: give the ingest a share of a GPU (weights.ingest_num_gpus).",
            [
                Query(
                    f"sum({rate('ray_rollout_quantize_bytes_total', APPLICATION)}) / "
                    f"(sum({rate('ray_rollout_quantize_seconds_total', APPLICATION)}) > 0)",
                    "while at work",
                )
            ],
        ),
        Panel(
            "Commits",
            "cps",
            "By outcome. QuantizationError: a trainer has sent NaN or infinity. VersionConflict: two trainers push "
            "under one number. Others are named in the ingest's log.",
            [Query(f"sum by (outcome) ({rate('ray_rollout_commits_total', APPLICATION)})", "{{outcome}}")],
        ),
        Panel(
            "Time of a commit",
            "s",
            "Until the version is the newest: the last conversions, and the files' sync. Long: the quantizer lags "
            "behind the upload, or the disk is slow to sync.",
            quantiles("ray_rollout_commit_seconds", APPLICATION),
        ),
        Panel(
            "Uploads under way",
            "short",
            "Versions begun and not committed, the parts that they lack, and those that cannot be committed any more. "
            "One that stays: its trainer died; it is dropped after weights.staged_ttl_s, or by DELETE.",
            [
                Query(f"sum(rollout_staged_uploads{{{SERVICE}}})", "uploads"),
                Query(f"sum by (version) (rollout_staged_missing_parts{{{SERVICE}}})", "parts that {{version}} lacks"),
                Query(f"sum by (version) (rollout_staged_failed{{{SERVICE}}})", "{{version}} failed"),
            ],
        ),
    ],
)

RUNNING = f'sum(rollout_replicas{{{SERVICE}, state=~"ready|syncing|stale"}})'
"""Replicas that take rollouts, or load their first version."""
SCALED = f'{APPLICATION}, deployment="engine"'
"""Selects what the replicas count that the autoscaler starts and stops: those of groups are not among them."""
AUTOSCALING = Row(
    "Autoscaling: does the fleet follow the load?",
    [
        Panel(
            "Target and actual",
            "short",
            "What our policy decided, and the replicas that take rollouts or load their first version. Target above "
            "actual for longer than an engine's start: the cluster has no GPU left. At the maximum with a queue: raise "
            "scaling.max_replicas.",
            [
                Query(f"max(ray_serve_autoscaling_target_replicas{{{SCALED}}})", "target"),
                Query(RUNNING, "actual"),
                Query(f"max(rollout_replicas_min{{{SERVICE}}})", "minimum"),
                Query(f"max(rollout_replicas_max{{{SERVICE}}})", "maximum"),
            ],
            steps=True,
        ),
        Panel(
            "Sequences per replica",
            "short",
            "Running and waiting over the replicas: the policy aims at scaling.target_sequences. Above it for longer "
            "than scaling.upscale_delay_s and an engine's start: the fleet is at its maximum.",
            [
                Query(f"sum(ray_rollout_sequences{{{SCALED}}}) / ({RUNNING} > 0)", "sequences"),
            ],
        ),
        Panel(
            "Calls waiting for a replica",
            "short",
            "In the gateways' handles, before admission. Above 0 for long: no replica runs, or all are being replaced.",
            [
                Query(
                    f"sum by (deployment) (ray_serve_deployment_queued_queries{{{APPLICATION}}})",
                    "{{deployment}}",
                )
            ],
        ),
        Panel(
            "Serve health",
            "short",
            "Replicas of each deployment whose health check passes, and how often one was started, by Serve. engine "
            "below ready replicas: Serve is about to replace one.",
            [
                Query(
                    f"sum by (deployment) (ray_serve_deployment_replica_healthy{{{APPLICATION}}})",
                    "{{deployment}} healthy",
                ),
                Query(
                    f"sum by (deployment) (ray_serve_deployment_replica_starts_total{{{APPLICATION}}})",
                    "{{deployment}} started",
                ),
            ],
            steps=True,
        ),
    ],
)
