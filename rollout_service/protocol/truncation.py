"""Truncated sampling: what is said to those who would read its logprobs as the model's own. No torch, vllm or ray."""

import warnings

_warned: set[str] = set()


class TruncatedSamplingWarning(UserWarning):
    """Logprobs of truncated sampling are compared with those of the whole vocabulary."""


def warn_of_truncated_sampling(caller: str) -> None:
    """Raise a TruncatedSamplingWarning in the name of ``caller``, the first time in this process."""
    if caller in _warned:
        return
    _warned.add(caller)
    warnings.warn(
        f"{caller}: rollouts were sampled with top_p, top_k, min_p or min_tokens, so their logprobs are renormalized "
        "over the tokens that were kept. Against the trainer's of the whole vocabulary every ratio is too small by the "
        "kept mass, and weights of sequences go to 0. Sample without truncation, or renormalize the trainer's logprobs "
        "over the sampling mask (rollout_service.correction.SamplingSupport)",
        TruncatedSamplingWarning,
        stacklevel=3,
    )
