"""A row of the mismatch dashboard: the FP8 KV cache and its scales."""

from dashboards.panels import REPLICA, Panel, Query, Row

KV_CACHE = Row(
    "KV cache: does FP8 hold the keys and values?",
    [
        Panel(
            "Saturated share, worst layer",
            "percentunit",
            "Largest share of any layer's k, of v beyond the largest FP8 code, by the replica that measured its first "
            "version. Above 0.1% the layer is unfit, above 1% an alert names it: its scale is too small, and the "
            "trainer must send another. Nothing here: other scales came since, or the dtype was chosen before.",
            [
                Query(
                    f"max by (replica, tensor) (rollout_kv_saturated_ratio{{{REPLICA}}})",
                    "{{tensor}}, measured by {{replica}}",
                )
            ],
            warn_above=0.01,
            steps=True,
        ),
        Panel(
            "KV cache dtype",
            "short",
            "1: a replica keeps keys and values in FP8; 0: in BF16, half as many tokens. Layers that are unfit for FP8 "
            "while it is served make rollouts wrong: GET /v1/fleet says which and why. All replicas should agree.",
            [
                Query(f"max by (replica) (rollout_kv_cache_fp8{{{REPLICA}}})", "{{replica}} in FP8"),
                Query(f"max(rollout_kv_unfit_layers{{{REPLICA}}})", "unfit layers"),
            ],
            steps=True,
        ),
    ],
)
