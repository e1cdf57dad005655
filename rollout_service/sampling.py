"""How to sample, as a request may ask for it. Needs neither torch, vllm nor ray."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout_service.types import Frozen, WeightVersion

Finite = Annotated[float, Field(allow_inf_nan=False)]


class CommonSampling(Frozen):
    """Sampling parameters that every data route takes under vLLM's names and in vLLM's form."""

    n: int = Field(default=1, ge=1, le=4096)
    """Completions of the prompt."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest completion; None: what the context leaves."""
    min_tokens: int = Field(default=0, ge=0)
    """No stop before so many tokens."""
    temperature: Finite = Field(default=1.0, ge=0.0, le=100.0)
    """0 is greedy."""
    top_p: Finite = Field(default=1.0, gt=0.0, le=1.0)
    """Below 1 the returned logprobs are renormalised over the truncated support."""
    top_k: int = Field(default=0, ge=-1)
    """0 or -1: all tokens."""
    min_p: Finite = Field(default=0.0, ge=0.0, le=1.0)
    """Least probability, as a share of the likeliest token's."""
    repetition_penalty: Finite = Field(default=1.0, gt=0.0)
    """1 is none."""
    presence_penalty: Finite = Field(default=0.0, ge=-2.0, le=2.0)
    """0 is none."""
    frequency_penalty: Finite = Field(default=0.0, ge=-2.0, le=2.0)
    """0 is none."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """Makes this request's samples repeatable on one replica."""
    ignore_eos: bool = False
    """Go on after the end of sequence."""
    logprobs: Literal[0] | None = 0
    """The sampled token's logprob always comes back; other tokens' are not implemented."""

    @model_validator(mode="after")
    def _greedy_is_one_completion(self) -> Self:
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n={self.n} greedy completions (temperature=0) would all be the same: ask for n=1")
        return self


class Sampling(CommonSampling):
    """Sampling parameters under vLLM's names. Fields that vLLM has and we do not implement are refused."""

    stop: tuple[str, ...] = ()
    """Strings that end a completion; the model needs a tokenizer."""
    stop_token_ids: tuple[int, ...] = ()
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
