"""Which rollouts the shadow scores, and what it is told of each. Needs neither torch, vllm nor ray."""

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
"""What leaves the model's own distribution as it is; so does a ``top_k`` below 1."""


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a rollout is among the ``share`` that is scored: by its name, so the same everywhere and every time."""
    return xxhash.xxh3_64_intdigest(request_id.encode(errors="surrogatepass")) < share * 2.0**64


def is_comparable(sampling: Sampling) -> bool:
    """Whether logprobs are those of the model's own distribution, which is all that scoring a prompt can tell."""
    return sampling.top_k < 1 and sampling.model_dump(include=set(_UNCHANGED)) == _UNCHANGED


def calls_of(rollout: Rollout) -> list[ScoreCall]:
    """Its completions that one version sampled on one replica; empty ones left out."""
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
