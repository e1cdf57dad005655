"""How to sample, as a request may ask for it. Needs neither torch, vllm nor ray.

The bounds lie within those of vLLM 0.32: what is valid here, vLLM takes, and takes as it is (a test holds them
together). Where vLLM would put another value in place of the one asked for, or its engine would fail on one that its
own checks let through, the value is refused here.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollout_service.protocol.base import Frozen, WeightVersion

Finite = Annotated[float, Field(allow_inf_nan=False)]
FEW = 8
MOST_COMPLETIONS = 4096
"""Completions of one request, over all its prompts."""
LARGEST_SEED = 2**63 - 1 - MOST_COMPLETIONS
LEAST_TEMPERATURE = 0.01
"""vLLM replaces what lies between 0 and this by this."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[tuple[StopString, ...], Field(max_length=64, fail_fast=True)]
StopTokens = Annotated[tuple[int, ...], Field(max_length=64, fail_fast=True)]
"""With ``min_tokens``, vLLM's GPU runner has room for 128, the model's own ends of sequence among them, and dies of
more."""


def refuse_many_unknown(known: Collection[str], data: Any) -> Any:
    """``data`` as it is. Raises ValueError for more than a few names that are not ``known``: pydantic would make an
    error of each, and a body has room for a million."""
    unknown = [name for name in data if name not in known] if isinstance(data, dict) and len(data) > len(known) else []
    if len(unknown) > FEW:
        raise ValueError(
            f"{len(unknown)} names are no fields here, or not implemented: leave out "
            f"{', '.join(name[:64] for name in unknown[:FEW])} and the rest"
        )
    return data


class CommonSampling(Frozen):
    """Sampling parameters that every data route takes under vLLM's names and in vLLM's form."""

    n: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    """Completions of the prompt."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; None: what the context leaves."""
    min_tokens: int = Field(default=0, ge=0)
    """No stop before so many tokens."""
    temperature: Finite = Field(default=1.0, ge=0.0, le=2.0)
    """0 is greedy; anything else is at least ``LEAST_TEMPERATURE``."""
    top_p: Finite = Field(default=1.0, gt=0.0, le=1.0)
    """Below 1 the returned logprobs are renormalised over the truncated support."""
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    """0 or -1: all tokens."""
    min_p: Finite = Field(default=0.0, ge=0.0, le=1.0)
    """Least probability, as a share of the likeliest token's."""
    repetition_penalty: Finite = Field(default=1.0, ge=0.01, le=100.0)
    """1 is none. Logits are multiplied and divided by it in fp32 and must stay finite."""
    presence_penalty: Finite = Field(default=0.0, ge=-2.0, le=2.0)
    """0 is none."""
    frequency_penalty: Finite = Field(default=0.0, ge=-2.0, le=2.0)
    """0 is none."""
    seed: int | None = Field(default=None, ge=-(2**63), le=LARGEST_SEED)
    """Makes this request's samples repeatable on one replica; -1 is none, as for vLLM. Completion ``i`` has
    ``seed + i``, which must fit 64 bits."""
    ignore_eos: bool = False
    """Go on after the end of sequence."""
    logprobs: Literal[0] | None = 0
    """The sampled token's logprob always comes back; other tokens' are not implemented."""

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, over which their logprobs are renormalized.

        vLLM ignores ``top_p``, ``top_k`` and ``min_p`` at temperature 0. ``min_tokens`` rules out what would end a
        completion too soon.
        """
        cut_off = self.top_p < 1 or self.top_k >= 1 or self.min_p > 0
        return self.min_tokens > 0 or (self.temperature > 0 and cut_off)

    @model_validator(mode="before")
    @classmethod
    def _few_are_unknown(cls, data: Any) -> Any:
        return refuse_many_unknown(cls.model_fields, data)

    @model_validator(mode="after")
    def _not_almost_greedy(self) -> Self:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g} is below {LEAST_TEMPERATURE:g}, which vLLM would use instead: "
                "send 0 for greedy sampling, or more"
            )
        return self

    @model_validator(mode="after")
    def _greedy_is_one_completion(self) -> Self:
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n={self.n} greedy completions (temperature=0) would all be the same: ask for n=1")
        return self


class Sampling(CommonSampling):
    """Sampling parameters under vLLM's names. Fields that vLLM has and we do not implement are refused."""

    stop: StopStrings = ()
    """Strings that end a completion; the model needs a tokenizer."""
    stop_token_ids: StopTokens = ()
    """Tokens that end a completion, beside the model's own end of sequence."""


class GenerateCall(Frozen):
    """What the gateway hands to an engine replica: one prompt, validated."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    min_weight_version: WeightVersion | None = None
    """Only weights at least this new may answer."""
    session_id: str | None = None
    """Calls of one session go to one replica while it lives, whose prefix cache has what they share."""
    priority: int = 0
    """vLLM's: lower is earlier."""
    origin: str = ""
    """The gateway that sends it, which knows itself what it has in flight where."""
    avoid: tuple[str, ...] = ()
    """Replicas that refused or lost this call: others first."""
