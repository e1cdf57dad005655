"""Distance between trainer and rollout, independent of the recipe: KL, perplexity, χ²."""

from dataclasses import dataclass

from rollout_service.correction.ratios import LogRatios, Rows, bounded, chi2, compare, k3, mult_prob_error


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Estimates of KL(rollout ‖ trainer) in nats per token. Merge several by a mean weighted with ``tokens``."""

    k1: float
    """Mean of ``rollout − trainer`` (verl's ``rollout_corr/kl``): unbiased, of either sign."""
    k3: float
    """Mean of ``exp(lr) − 1 − lr`` with ``lr = trainer − rollout`` (verl's ``rollout_corr/k3_kl``): never negative."""
    tokens: int
    """Number of tokens in the means."""


def measure_mismatch(trainer_logprobs: Rows, rollout_logprobs: Rows, mask: Rows | None = None) -> Mismatch:
    """Compute k1 and k3 between the trainer's and the engine's logprobs of the sampled tokens, in fp64.

    All are natural logs, [batch, tokens] or ragged. ``mask`` is bool or 0/1; values at masked positions have no
    influence. In k3, and only there, ``lr`` is clamped to ±20. The estimators are from Schulman, "Approximating KL
    Divergence" (2020); ``correct`` computes more metrics, and raises the same errors.
    """
    ratios = compare(trainer_logprobs, rollout_logprobs, mask)
    log_ratio = ratios.log_ratio[ratios.selected]
    return Mismatch(k1=-log_ratio.mean().item(), k3=k3(log_ratio).mean().item(), tokens=len(log_ratio))


def mismatch_metrics(ratios: LogRatios) -> dict[str, float]:
    """Return verl's off-policy metrics, and those of NeMo-RL and SkyRL; names without prefix.

    Tokens are averaged over the batch, perplexities over sequences. Every value is finite: exponents are first clamped
    to ±20. With ``lr = trainer − rollout`` and ``ρ = exp(lr)``:

    - ``kl`` mean(−lr), ``k3_kl`` mean(ρ − 1 − lr) (NeMo-RL's ``gen_kl_error``, prime-rl's ``mismatch_kl``)
    - ``chi2_token`` mean(ρ²) − 1, ``chi2_seq`` mean over sequences of (Π ρ)² − 1
    - ``training_ppl``, ``rollout_ppl``: mean over sequences of exp(−mean logprob); ``…_log_ppl`` without the exp;
      ``log_ppl_diff`` their difference per sequence, with ``abs``, ``max``, ``min``; ``ppl_ratio`` mean of its exp
    - ``token_mult_prob_error`` mean(exp |lr|) (NeMo-RL); ``rollout_train_logprobs_abs_diff_…`` of |lr| (SkyRL)
    """
    log_ratio = ratios.log_ratio[ratios.selected]
    distance = log_ratio.abs()
    training = -ratios.sequence_mean(ratios.trainer)[ratios.rows]
    rollout = -ratios.sequence_mean(ratios.rollout)[ratios.rows]
    difference = -ratios.sequence_mean(ratios.log_ratio)[ratios.rows]
    product = ratios.log_ratio.sum(-1)[ratios.rows]
    return {
        "kl": -log_ratio.mean().item(),
        "k3_kl": k3(log_ratio).mean().item(),
        "chi2_token": chi2(log_ratio).mean().item(),
        "token_mult_prob_error": mult_prob_error(log_ratio).mean().item(),
        "rollout_train_logprobs_abs_diff_mean": distance.mean().item(),
        "rollout_train_logprobs_abs_diff_max": distance.max().item(),
        "rollout_train_logprobs_abs_diff_std": distance.std(correction=0).item(),
        "training_ppl": bounded(training).exp().mean().item(),
        "training_log_ppl": training.mean().item(),
        "rollout_ppl": bounded(rollout).exp().mean().item(),
        "rollout_log_ppl": rollout.mean().item(),
        "log_ppl_diff": difference.mean().item(),
        "log_ppl_abs_diff": difference.abs().mean().item(),
        "log_ppl_diff_max": difference.max().item(),
        "log_ppl_diff_min": difference.min().item(),
        "ppl_ratio": bounded(difference).exp().mean().item(),
        "chi2_seq": chi2(product).mean().item(),
    }
