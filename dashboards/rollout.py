"""The dashboard of the fleet: traffic and latency."""

from dashboards.panels import APPLICATION, ENGINE, OR_NOTHING_YET, REPLICA, SERVICE, VLLM, Panel, Query, Row


def rate(counter: str, selector: str) -> str:
    """Per second."""
    return f"rate({counter}{{{selector}}}[$__rate_interval])"


def quantiles(histogram: str, selector: str, by: str = "") -> list[Query]:
    """Of a histogram: p50, p90 and p99."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    buckets = f"sum by ({labels}) ({rate(f'{histogram}_bucket', selector)})"
    return [Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:.0f}{legend}") for q in (0.5, 0.9, 0.99)]


THROUGHPUT = Row(
    "Throughput: how much do trainers get?",
    [
        Panel(
            "Tokens to clients",
            "cps",
            "Tokens per second of answered prompts. A drop at steady load: look at refusals, at replicas that are not "
            "ready, and at updates; a drop after a trainer's step is the trainer not asking.",
            [
                Query(f"sum({rate('ray_rollout_completion_tokens_total', APPLICATION)})", "completions"),
                Query(f"sum({rate('ray_rollout_prompt_tokens_total', APPLICATION)})", "prompts"),
            ],
        ),
        Panel(
            "Tokens sampled, per replica",
            "cps",
            "Tokens per second that each engine made. One replica far below the others at the same number of sequences "
            "has a slower or shared GPU: replace its node.",
            [Query(f"sum by (ReplicaId) ({rate('ray_vllm_generation_tokens_total', VLLM)})", "{{ReplicaId}}")],
        ),
        Panel(
            "Tokens thrown away",
            "cps",
            "Sampled by an engine, and given to nobody: clients that hung up, replicas that died, and answers still "
            "under way (then it swings around 0). Lasting and above a few percent of what is sampled: clients time "
            "out, or replicas die under their rollouts.",
            [
                Query(
                    f"sum({rate('ray_vllm_generation_tokens_total', VLLM)}) - "
                    f"sum({rate('ray_rollout_completion_tokens_total', APPLICATION)})",
                    "sampled - given",
                )
            ],
            signed=True,
        ),
        Panel(
            "Prompts by outcome",
            "reqps",
            "One prompt counts once, with all its completions. Overloaded: the gateways' queue is full. "
            "NotReady: no replica can start, or the service ends. TooEarly: a min_weight_version that is not "
            "there in time. Anything else but ok and "
            "cancelled is an error of the client or ours: see the gateway's log.",
            [Query(f"sum by (outcome) ({rate('ray_rollout_requests_total', APPLICATION)})", "{{outcome}}")],
            stacked=True,
        ),
        Panel(
            "Completions by end",
            "cps",
            "length: cut off at max_tokens; where a trainer's share of it grows, its policy rambles or max_tokens is "
            "too small. abort: given as they were when cut off.",
            [
                Query(
                    f"sum by (finish_reason) ({rate('ray_rollout_completions_total', APPLICATION)})",
                    "{{finish_reason}}",
                ),
                Query(
                    f"sum({rate('ray_rollout_mixed_completions_total', APPLICATION)}){OR_NOTHING_YET}",
                    "of several versions",
                ),
            ],
        ),
        Panel(
            "Waiting for an engine",
            "short",
            "Sequences that wait in the gateways because every replica holds as many as it may. They wait as "
            "long as it "
            "takes, and the autoscaler counts them. Lasting, while all replicas take rollouts: raise "
            "scaling.max_replicas. While none does: see GET /health.",
            [Query(f"sum(ray_rollout_queue_sequences{{{APPLICATION}}}){OR_NOTHING_YET}", "sequences")],
        ),
        Panel(
            "Retries",
            "cps",
            "Refusals of a replica that was full (Overloaded), behind (TooEarly) or being replaced (NotReady), after "
            "which the gateway asks another one; and continuations of what an update cut off (abort) or a replica's "
            "death lost (lost). A few Overloaded at a burst are normal: what replicas publish is a second old. "
            "lost: see "
            "the engines' log.",
            [
                Query(
                    f"sum by (reason) ({rate('ray_rollout_refusals_total', APPLICATION)}){OR_NOTHING_YET}",
                    "refused: {{reason}}",
                ),
                Query(
                    f"sum by (cause) ({rate('ray_rollout_continuations_total', APPLICATION)}){OR_NOTHING_YET}",
                    "continued: {{cause}}",
                ),
            ],
        ),
        Panel(
            "HTTP requests",
            "reqps",
            "Through Serve's proxy, by status. 5xx other than 503 are faults of ours; 401 and 403 a client without the "
            "token; 422 a client that asks for what is not there.",
            [
                Query(
                    f"sum by (route, status_code) ({rate('ray_serve_num_http_requests_total', APPLICATION)})",
                    "{{route}} {{status_code}}",
                )
            ],
        ),
    ],
)

LATENCY = Row(
    "Latency: where does the time of a rollout go?",
    [
        Panel(
            "Time to last token",
            "s",
            "From a prompt's arrival at the gateway to its last completion's last token, with all waiting. p99 is what "
            "a synchronous trainer waits for. Growing while tokens per second stay: the queue grows, add replicas.",
            quantiles("ray_rollout_time_to_last_token_seconds", APPLICATION),
        ),
        Panel(
            "Queue in the engine",
            "s",
            "From arrival in the engine to its first step. Above a second: more sequences than engine.max_num_seqs or "
            "the KV cache hold; add replicas, or lower scaling.target_sequences.",
            quantiles("ray_vllm_request_queue_time_seconds", VLLM),
        ),
        Panel(
            "Time to first token",
            "s",
            "Queue and prefill. Far above the queue: long prompts without prefix hits, or an update that closed the "
            "engine meanwhile.",
            quantiles("ray_vllm_time_to_first_token_seconds", VLLM),
        ),
        Panel(
            "Time per output token",
            "s",
            "Between a sequence's tokens, mean of each. It grows with the batch; growing at the same batch: the GPU is "
            "throttled or shared.",
            quantiles("ray_vllm_request_time_per_output_token_seconds", VLLM),
        ),
        Panel(
            "Time in the engine",
            "s",
            "From arrival in the engine to the last token. The time to last token less this is the gateway's: waiting "
            "for a replica or a version, and attempts that were lost.",
            quantiles("ray_vllm_e2e_request_latency_seconds", VLLM),
        ),
        Panel(
            "Sequences that ended in the engine",
            "cps",
            "By vLLM's reason. abort outside updates and pauses: clients hang up, and their tokens are lost.",
            [
                Query(
                    f"sum by (finished_reason) ({rate('ray_vllm_request_success_total', VLLM)})", "{{finished_reason}}"
                )
            ],
        ),
    ],
)

FLEET = Row(
    "Fleet: is every replica well, and are there enough?",
    [
        Panel(
            "Replicas by state",
            "short",
            "ready, syncing and stale ones take rollouts, a new one once it has a version. starting or syncing for "
            "longer than an engine's start: see its log. failed: it is being replaced. stale: it cannot reach the "
            "newest version and takes no request that needs it. asleep: it gave its memory to a trainer, as asked.",
            [Query(f"sum by (state) (rollout_replicas{{{SERVICE}}})", "{{state}}")],
            stacked=True,
            steps=True,
        ),
        Panel(
            "State of each replica",
            "short",
            "The state that a replica is in. One that is neither ready nor draining for long says why in GET "
            "/v1/fleet.",
            [Query(f"sum by (replica, state) (rollout_replica_state{{{REPLICA}}}) == 1", "{{replica}}: {{state}}")],
            stacked=True,
            steps=True,
        ),
        Panel(
            "Replica errors",
            "short",
            "1: a replica says why it is not at the newest version or is being replaced (GET /v1/fleet has the text), "
            "or it has obeyed a pause. A pause that nobody wants any more: POST /resume.",
            [
                Query(f"max by (replica) (rollout_replica_error{{{REPLICA}}})", "error of {{replica}}"),
                Query(f"max by (replica) (rollout_replica_paused{{{REPLICA}}})", "{{replica}} paused"),
                Query(f"max(rollout_paused{{{SERVICE}}})", "operator wants a pause"),
            ],
            steps=True,
        ),
        Panel(
            "Starts and failures",
            "short",
            "Since the ingest started. Failures that keep coming: a version that engines cannot load, too little GPU "
            "memory, or a bad node; the engines' log says which.",
            [
                Query(f"sum(rollout_replica_starts_total{{{SERVICE}}})", "started"),
                Query(f"sum(rollout_replica_failures_total{{{SERVICE}}})", "failed"),
            ],
            steps=True,
        ),
        Panel(
            "Age of the last report",
            "s",
            "Each replica reports at every weights.poll_s, and is dead for the ingest at weights.dead_after_s. Close "
            "to that: a node without CPU time, or a network that loses calls.",
            [Query(f"max by (replica) (rollout_replica_report_age_seconds{{{REPLICA}}})", "{{replica}}")],
        ),
        Panel(
            "Sequences admitted",
            "short",
            "What each replica holds, queued ones included; at engine.admission_limit it takes no more. Uneven "
            "for long: "
            "few very long rollouts, or sessions that stick to one replica.",
            [Query(f"max by (replica) (rollout_replica_sequences{{{REPLICA}}})", "{{replica}}")],
        ),
        Panel(
            "Running and waiting",
            "short",
            "In each engine. Waiting that lasts: engine.max_num_seqs or the KV cache is full; add replicas. This is "
            "what the autoscaler sees.",
            [
                Query(f"max by (replica, state) (ray_rollout_sequences{{{ENGINE}}})", "{{replica}} {{state}}"),
            ],
        ),
        Panel(
            "Batch that vLLM decodes",
            "short",
            "vLLM's own count, shown only while it makes steps. Far below Running of our own: updates or pauses hold "
            "the engine.",
            [
                Query(f"max by (ReplicaId) (ray_vllm_num_requests_running{{{VLLM}}})", "{{ReplicaId}} running"),
                Query(f"max by (ReplicaId) (ray_vllm_num_requests_waiting{{{VLLM}}})", "{{ReplicaId}} waiting"),
            ],
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            "Share of its blocks. Above 90% vLLM soon preempts sequences: lower scaling.target_sequences, or give the "
            "engine more memory.",
            [
                Query(f"max by (replica) (ray_rollout_kv_usage_ratio{{{ENGINE}}})", "{{replica}}"),
                Query(f"max by (ReplicaId) (ray_vllm_kv_cache_usage_perc{{{VLLM}}})", "{{ReplicaId}}, by vLLM"),
            ],
            warn_above=0.9,
        ),
        Panel(
            "Prefix cache",
            "percentunit",
            "Share of looked-up prompt tokens that were found: prefill saved. With n completions of a prompt it should "
            "be near (n-1)/n; far below: prompts shorter than a block, or an update that emptied the cache.",
            [
                Query(
                    f"sum({rate('ray_vllm_prefix_cache_hits_total', VLLM)}) / "
                    f"(sum({rate('ray_vllm_prefix_cache_queries_total', VLLM)}) > 0)",
                    "found",
                )
            ],
        ),
        Panel(
            "Decode attention spared by groups",
            "percentunit",
            "Share of the tokens that decode attends to and does not read again, since another completion of the same "
            "prompt has read them: (n-1)/n of the prompts' part where groups decode together. Near 0 with n above 1: "
            "prompts below 512 tokens, or members on other replicas. Nothing here: attention is another kernel's, see "
            "GET /v1/fleet.",
            [
                Query(
                    f"sum by (replica) ({rate('ray_rollout_decode_kv_tokens_spared_total', ENGINE)}) / "
                    f"(sum by (replica) ({rate('ray_rollout_decode_kv_tokens_total', ENGINE)}) > 0)",
                    "{{replica}}",
                )
            ],
        ),
        Panel(
            "Preemptions",
            "cps",
            "Sequences thrown out of the KV cache and computed again. Each update does so to those that run; between "
            "updates the cache is too small and throughput is lost: lower "
            "scaling.target_sequences or engine.max_num_seqs.",
            [
                Query(
                    f"sum by (ReplicaId) ({rate('ray_vllm_num_preemptions_total', VLLM)}){OR_NOTHING_YET}",
                    "{{ReplicaId}}",
                )
            ],
        ),
        Panel(
            "Prefill",
            "cps",
            "Prompt tokens per second that engines computed or found. Far above prompts to clients: preemptions or "
            "continuations compute prompts again.",
            [Query(f"sum by (ReplicaId) ({rate('ray_vllm_prompt_tokens_total', VLLM)})", "{{ReplicaId}}")],
        ),
    ],
)
