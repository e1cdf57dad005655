"""The dashboard of the mismatch between engines and trainer, beside throughput."""

from dashboards.kv_cache import KV_CACHE
from dashboards.panels import APPLICATION, AT_NEWEST, REPLICA, SERVICE, VLLM, Panel, Query, Row
from dashboards.rollout import rate

SUSPECT_K3, SUSPECT_PROB_ERROR = 0.01, 1.05
"""Defaults of the config's section ``monitor``."""


def statistic(name: str, by: str = "version, adapter, replica") -> str:
    """A statistic of each version, adapter and replica."""
    return f"max by ({by}) (rollout_mismatch_{name}{{{REPLICA}}})"


EACH = "v{{version}} {{adapter}} {{replica}}"

NOW = Row(
    "Is the rollout policy the trainer's?",
    [
        Panel(
            "Suspect versions",
            "short",
            "1: a replica's mismatch with this version is above monitor.suspect_k3 or monitor.suspect_prob_error. One "
            "replica alone: a broken update, replace the replica. All of them: the version, the quantization or the "
            "trainer's temperature, mask or tokenizer; compare with the version before, stop training on its rollouts.",
            [Query(f"max by (version, adapter, replica) (rollout_version_suspect{{{REPLICA}}})", EACH)],
            warn_above=1,
            steps=True,
        ),
        Panel(
            "Time suspect",
            "s",
            "How long a version has been suspect on a replica; empty if none is. Longer than a trainer's step: nobody "
            "looked.",
            [
                Query(
                    "max by (version, adapter, replica) "
                    f"(time() - rollout_version_suspect_timestamp_seconds{{{REPLICA}}})",
                    EACH,
                )
            ],
        ),
        Panel(
            "Tokens measured",
            "short",
            "What the numbers of each version rest on, on all replicas. Below "
            "monitor.min_tokens per replica a version is not judged. The newest version without a line: the trainer "
            "calls report_mismatch no more, and what is shown here is old. Truncated ones (top_p, top_k, min_p) "
            "are not judged at all.",
            [
                Query(f"sum by (version) (rollout_mismatch_tokens_total{{{REPLICA}}})", "v{{version}}"),
                Query(
                    f"sum by (version) (rollout_mismatch_sequences_total{{{REPLICA}}})",
                    "sequences of v{{version}}",
                    right=True,
                ),
                Query(
                    f"sum by (version) (rollout_mismatch_truncated_tokens_total{{{REPLICA}}})",
                    "truncated, not judged, of v{{version}}",
                ),
            ],
            right_unit="short",
            steps=True,
        ),
    ],
)

KL = Row(
    "KL: how far, and is it the version or one replica?",
    [
        Panel(
            "k3 per version, adapter and replica",
            "none",
            "mean(exp(lr) - 1 - lr), the KL of engine against trainer in nats per token. FP8 noise of large models is "
            "0.001 to 0.01. A jump with one version is a broken update or a change in the trainer; one replica apart "
            "from the others at the same version is a broken replica; a slow rise over all versions is the trainer "
            "drifting where FP8 hurts: use TIS, or leave layers in BF16 (quant.skip).",
            [Query(statistic("k3"), EACH)],
            warn_above=SUSPECT_K3,
            logarithmic=True,
        ),
        Panel(
            "k3 of the newest version",
            "none",
            "Per replica. All lines should lie on one another: a replica that stands out did not load what the others "
            "did. Replace it, and discard its rollouts.",
            [Query(f"{statistic('k3')} and {AT_NEWEST}", "{{adapter}} {{replica}}")],
            warn_above=SUSPECT_K3,
        ),
        Panel(
            "Band of k3 over replicas",
            "none",
            "Largest, median and smallest of all replicas per version. A wide band: replicas differ at the same "
            "weights, see k3 of the newest version. A narrow one that lies high: the version itself.",
            [
                Query(f"max by (version, adapter) ({statistic('k3')})", "v{{version}} {{adapter}} largest"),
                Query(f"quantile by (version, adapter) (0.5, {statistic('k3')})", "v{{version}} {{adapter}} median"),
                Query(f"min by (version, adapter) ({statistic('k3')})", "v{{version}} {{adapter}} smallest"),
            ],
            warn_above=SUSPECT_K3,
        ),
        Panel(
            "Band of |lr| per version, adapter and replica",
            "none",
            "Quantiles 0.5, 0.9, 0.99 and 0.999 of |trainer - rollout| in nats. A median near 0 below a high 0.999 is "
            "noise on a few uncertain tokens, as FP8 makes it. A median that moves is wrong everywhere: weights, "
            "temperature or tokenizer.",
            [
                Query(
                    f"{statistic('abs_diff', 'version, adapter, replica, quantile')} and {AT_NEWEST}",
                    "q{{quantile}} {{adapter}} {{replica}}",
                )
            ],
            logarithmic=True,
        ),
        Panel(
            "k1",
            "none",
            "mean(-lr): the same KL, signed. Far from 0 and about as large as the mean |lr|: a systematic "
            "difference, such as another temperature.",
            [Query(statistic("k1"), EACH)],
            signed=True,
        ),
        Panel(
            "k3 by age of keys and values",
            "none",
            "Of the newest versions, by how many versions a token's keys and values are older than its weights "
            "(weights.kv_cache_on_update: keep). Age 0 is the mismatch without that. An age whose line lies far above "
            "it costs more than it saves: set weights.kv_max_age below it.",
            [Query(f"max by (kv_age) (rollout_mismatch_kv_age_k3{{{SERVICE}}})", "{{kv_age}} versions")],
            warn_above=SUSPECT_K3,
            logarithmic=True,
        ),
        Panel(
            "Probability error by age of keys and values",
            "none",
            "mean(exp |lr|) of the same tokens on the left, and their number on the right. Few tokens of an age: its "
            "figures are noise.",
            [
                Query(f"max by (kv_age) (rollout_mismatch_kv_age_prob_error{{{SERVICE}}})", "{{kv_age}} versions"),
                Query(
                    f"max by (kv_age) (rollout_mismatch_kv_age_tokens{{{SERVICE}}})",
                    "{{kv_age}} versions, tokens",
                    right=True,
                ),
            ],
            right_unit="short",
            warn_above=SUSPECT_PROB_ERROR,
        ),
        Panel(
            "KL against throughput",
            "none",
            "k3 of the newest version, its worst replica, on the left; tokens per second on the right. Precision "
            "buys throughput: when k3 rises at the same throughput nothing was gained, look at the version.",
            [
                Query(f"max({statistic('k3')} and {AT_NEWEST})", "k3"),
                Query(
                    f"sum({rate('ray_rollout_completion_tokens_total', APPLICATION)})", "tokens to clients", right=True
                ),
                Query(f"sum({rate('ray_vllm_generation_tokens_total', VLLM)})", "tokens sampled", right=True),
            ],
            right_unit="cps",
        ),
    ],
)

WEIGHTS = Row(
    "Correction: what do importance weights cost?",
    [
        Panel(
            "Effective sample size",
            "percentunit",
            "Of truncated weights, as a share of the tokens: 1 is on-policy. Below 0.9 the trainer learns from fewer "
            "tokens than it pays for: rollouts are too stale, or precision too low.",
            [Query(statistic("ess_ratio"), EACH)],
            warn_below=0.9,
        ),
        Panel(
            "Clipped share",
            "percentunit",
            "Tokens with a probability ratio outside [1/C, C], which TIS clips (C is monitor.ratio_bound). Above 1%: "
            "the correction throws away what it should weigh; find the cause before raising C.",
            [Query(statistic("ratio_outside"), EACH)],
            warn_above=0.01,
        ),
        Panel(
            "Probability error",
            "none",
            "mean(exp |lr|), the token multiplicative probability error: 1 is none. Above 1.05 a large model is "
            "suspect; a tiny one in FP8 lies there when all is well: take monitor.suspect_prob_error from good ones.",
            [Query(statistic("prob_error"), EACH)],
            warn_above=SUSPECT_PROB_ERROR,
            signed=True,
        ),
        Panel(
            "chi² of tokens",
            "none",
            "mean(exp(2 lr)) - 1: the variance of untruncated weights. Far above twice k3: a few tokens with huge "
            "ratios dominate; truncate or mask them.",
            [Query(statistic("chi2"), EACH)],
            signed=True,
        ),
        Panel(
            "Largest |lr|",
            "none",
            "In nats, of a single token. Above 5: a token that one side holds for all but impossible, often a masked "
            "or special one that should not be counted. A new version with a far larger one than the last: look at "
            "its rollouts.",
            [Query(statistic("abs_diff_max"), EACH)],
        ),
        Panel(
            "Versions and mismatch",
            "none",
            "Worst probability error of each version's replicas against how far behind the fleet is, on the right. "
            "Errors that grow with staleness come from old weights, not from low precision: the trainer pairs "
            "logprobs of the wrong version.",
            [
                Query(f"max(rollout_mismatch_prob_error{{{REPLICA}}})", "worst probability error"),
                Query(f"max(rollout_replica_staleness_versions{{{REPLICA}}})", "versions behind", right=True),
            ],
            right_unit="short",
            signed=True,
        ),
    ],
)

ROWS = (NOW, KL, WEIGHTS, KV_CACHE)
