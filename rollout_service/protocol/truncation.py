"""Warning for truncated sampling, whose logprobs are not the model's own. Needs neither torch, vllm nor ray."""

import warnings

_warned: set[str] = set()


class TruncatedSamplingWarning(UserWarning):
    """Warns that logprobs of truncated sampling are compared with those of the whole vocabulary."""


def warn_of_truncated_sampling(caller: str) -> None:
    """Issue a TruncatedSamplingWarning that names ``caller``, once per process and caller."""
    if caller in _warned:
        return
    _warned.add(caller)
    warnings.warn(
        f"{caller}: rollouts were sampled with top_p, top_k, min_p, min_tokens, logit_bias or structured_outputs, so "
        "their logprobs are renormalized over the tokens that were kept. Against the trainer's of the whole vocabulary "
        "every ratio is too small by the kept mass, and weights of sequences go to 0. Sample without truncation, or "
        "renormalize the trainer's logprobs over the sampling mask (rollout_service.correction.SamplingSupport)",
        TruncatedSamplingWarning,
        stacklevel=3,
    )
