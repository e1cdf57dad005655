"""Selection of the rollouts that the shadow scores, and their conversion to calls. Needs neither torch, vllm nor
ray."""

import xxhash

from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import Sampling
from rollout_service.protocol.scoring import ScoreCall

_UNCHANGED = Sampling().model_dump(
    include={
        "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
        "logit_bias", "structured_outputs",
    }
)  # fmt: skip
"""Sampling parameters with which tokens are drawn from the model's own distribution; ``top_k`` must also be below 1."""


def is_sampled(request_id: str, share: float) -> bool:
    """Return True if the rollout is in the sampled ``share``. Decided by its id, so equal in all processes."""
    return xxhash.xxh3_64_intdigest(request_id.encode(errors="surrogatepass")) < share * 2.0**64


def is_comparable(sampling: Sampling) -> bool:
    """Return True if logprobs are of the model's own distribution, since scoring a prompt yields only these."""
    return sampling.top_k < 1 and sampling.model_dump(include=set(_UNCHANGED)) == _UNCHANGED


def calls_of(rollout: Rollout) -> list[ScoreCall]:
    """Return the completions that one version sampled on one replica, without empty ones."""
    return [
        ScoreCall(
            version=completion.spans[0].version,
            replica_id=completion.spans[0].replica_id or rollout.replica_id,
            prompt_token_ids=rollout.prompt_token_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
        )
        for completion in rollout.completions
        if len(completion.spans) == 1
    ]
