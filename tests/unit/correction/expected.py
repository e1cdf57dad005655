"""Every formula once more, in plain Python on unpadded rows: what the tests hold the library against."""

import math
from statistics import fmean, pstdev, stdev

Pair = tuple[float, float]
"""(trainer's logprob, rollout's logprob) of one token."""
Rows = list[list[Pair]]
"""One list per sequence, its sampled tokens only."""


def bounded_exp(log: float) -> float:
    return math.exp(min(max(log, -20.0), 20.0))


def log_ratios(row: list[Pair]) -> list[float]:
    return [trainer - rollout for trainer, rollout in row]


def raw_weights(rows: Rows, level: str) -> list[list[float]]:
    """The ratio that each token is weighted by, before any bound."""
    found = []
    for row in rows:
        logs = log_ratios(row)
        joined = {"sequence": math.fsum(logs), "geometric": math.fsum(logs) / max(len(logs), 1)}
        found.append([bounded_exp(joined.get(level, log)) for log in logs])
    return found


def bounded_weights(rows: Rows, level: str, lower: float | None, upper: float, outside: str) -> list[list[float]]:
    low = 0.0 if lower is None else lower
    if outside == "mask":
        return [[w if low <= w <= upper else 0.0 for w in row] for row in raw_weights(rows, level)]
    return [[min(max(w, low), upper) for w in row] for row in raw_weights(rows, level)]


def divergence(kind: str, log: float) -> float:
    log = min(max(log, -20.0), 20.0)
    return {"k1": -log, "k2": log * log / 2, "k3": math.expm1(log) - log}[kind]


def of_token(kind: str, pair: Pair) -> float:
    trainer, rollout = pair
    p, mu = math.exp(trainer), math.exp(rollout)
    special = {
        "prob_diff": abs(p - mu),
        "ratio_diff": abs(bounded_exp(trainer - rollout) - 1),
        "binary_kl": binary_kl(mu, p),
        "binary_kl_both": max(binary_kl(mu, p), binary_kl(p, mu)),
    }
    if kind in special:
        return special[kind]
    return bounded_exp(abs(trainer - rollout)) if kind == "prob_error" else divergence(kind, trainer - rollout)


def binary_kl(a: float, b: float) -> float:
    """KL divergence of two Bernoulli distributions, their probabilities at least 1e-6 from 0 and 1."""
    a, b = (min(max(value, 1e-6), 1 - 1e-6) for value in (a, b))
    return max(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)), 0.0)


def mean_squares_up_to(rows: Rows) -> list[list[float]]:
    """For each token, the mean square of the log-ratios that are no larger than its own."""
    squares = [[log * log for log in log_ratios(row)] for row in rows]
    every = [square for row in squares for square in row]
    return [[fmean(other for other in every if other <= square) for square in row] for row in squares]


def statistic(rows: Rows, name: str) -> list[list[float]]:
    """What a rejection looks at, for each token; a sequence's statistic stands at each of its tokens."""
    if name == "token_m2":
        return mean_squares_up_to(rows)
    joined = next(joined for joined in ("token", "seq_sum", "seq_mean", "seq_max") if name.startswith(joined))
    found = []
    for row in rows:
        tokens = [of_token(name.removeprefix(f"{joined}_"), pair) for pair in row]
        if joined == "seq_sum":
            tokens = [math.fsum(tokens)] * len(tokens)
        elif joined == "seq_mean":
            tokens = [math.fsum(tokens) / len(tokens)] * len(tokens) if tokens else []
        elif joined == "seq_max":
            tokens = [max(tokens)] * len(tokens) if tokens else []
        found.append(tokens)
    return found


def mismatch(rows: Rows) -> dict[str, float]:
    logs = [log for row in rows for log in log_ratios(row)]
    sequences = [row for row in rows if row]
    training = [-math.fsum(t for t, _ in row) / len(row) for row in sequences]
    rollout = [-math.fsum(r for _, r in row) / len(row) for row in sequences]
    difference = [t - r for t, r in zip(training, rollout, strict=True)]
    return {
        "kl": fmean(-log for log in logs),
        "k3_kl": fmean(divergence("k3", log) for log in logs),
        "chi2_token": fmean(bounded_exp(log) ** 2 for log in logs) - 1,
        "token_mult_prob_error": fmean(bounded_exp(abs(log)) for log in logs),
        "rollout_train_logprobs_abs_diff_mean": fmean(abs(log) for log in logs),
        "rollout_train_logprobs_abs_diff_max": max(abs(log) for log in logs),
        "rollout_train_logprobs_abs_diff_std": pstdev(abs(log) for log in logs),
        "training_ppl": fmean(bounded_exp(value) for value in training),
        "training_log_ppl": fmean(training),
        "rollout_ppl": fmean(bounded_exp(value) for value in rollout),
        "rollout_log_ppl": fmean(rollout),
        "log_ppl_diff": fmean(difference),
        "log_ppl_abs_diff": fmean(abs(value) for value in difference),
        "log_ppl_diff_max": max(difference),
        "log_ppl_diff_min": min(difference),
        "ppl_ratio": fmean(bounded_exp(value) for value in difference),
        "chi2_seq": fmean(bounded_exp(math.fsum(log_ratios(row))) ** 2 for row in sequences) - 1,
    }


def spread(tokens: list[float], units: list[float], means: list[float]) -> dict[str, float]:
    """Of all tokens, of whatever is bounded (tokens or sequences), and of the means of sequences."""
    return {
        "mean": fmean(tokens),
        "max": max(units),
        "min": min(units),
        "seq_mean": fmean(means),
        "seq_std": stdev(means) if len(means) > 1 else 0.0,
        "seq_max": max(means),
        "seq_min": min(means),
    }


def of_weights(rows: Rows, level: str, lower: float | None, upper: float, outside: str) -> dict[str, float]:
    rows = [row for row in rows if row]
    raw, weights = raw_weights(rows, level), bounded_weights(rows, level, lower, upper, outside)
    tokens, raw_tokens = [w for row in weights for w in row], [w for row in raw for w in row]
    means, raw_means = [fmean(row) for row in weights], [fmean(row) for row in raw]
    counted, shown = (raw_tokens, tokens) if level == "token" else (raw_means, raw_means)
    low = 1 / upper if lower is None else lower
    total, squares = math.fsum(tokens), math.fsum(w * w for w in tokens)
    found = {
        **spread(tokens, shown, means),
        "std": pstdev(tokens),
        "eff_sample_size": total * total / squares / len(tokens) if squares else 0.0,
        "ratio_fraction_high": fmean(w > upper for w in counted),
        "ratio_fraction_low": fmean(w < low for w in counted),
        "seq_max_deviation": max(abs(mean - 1) for mean in means),
        "seq_fraction_high": fmean(mean > upper for mean in raw_means),
        "seq_fraction_low": fmean(mean < low for mean in raw_means),
    }
    if outside == "mask":
        found["oob_ratio"] = fmean(not (lower or 0.0) <= w <= upper for w in raw_tokens)
    return {f"rollout_is_{name}": value for name, value in found.items()}


def of_rejection(rows: Rows, name: str, low: float, high: float) -> dict[str, float]:
    """``low`` and ``high`` are of the statistic."""
    measured = [row for row in statistic(rows, name) if row]
    tokens = [value for row in measured for value in row]
    means = [fmean(row) for row in measured]
    units = tokens if name.startswith("token") else means
    outside = [[not low <= value <= high for value in row] for row in measured]
    found = {
        **spread(tokens, units, means),
        "std": pstdev(min(max(value, low), high) for value in tokens),
        "fraction_high": fmean(value > high for value in units),
        "fraction_low": fmean(value < low for value in units),
        "seq_max_deviation": max(abs(mean) for mean in means),
        "seq_fraction_high": fmean(mean > high for mean in means),
        "seq_fraction_low": fmean(mean < low for mean in means),
        "masked_fraction": fmean(value for row in outside for value in row),
        "seq_masked_fraction": fmean(any(row) for row in outside),
    }
    return {f"rollout_rs_{name}_{key}": value for key, value in found.items()}
