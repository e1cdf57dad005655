"""How to sample, as a request may ask for it. Needs neither torch, vllm nor ray.

The bounds lie within those of vLLM 0.32: what is valid here, vLLM takes, and takes as it is (a test holds them
together). Where vLLM would put another value in place of the one asked for, or its engine would fail on one that its
own checks let through, the value is refused here.
"""

import functools
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollout_service.protocol.base import Frozen, WeightVersion

Finite = Annotated[float, Field(allow_inf_nan=False)]
FEW = 8
MOST_COMPLETIONS = 4096
"""Completions of one request, over all its prompts."""
MOST_BIASED = 300
"""Tokens with a ``logit_bias``, as OpenAI bounds them."""
LONGEST_GRAMMAR = 1 << 16
"""Characters of what describes structured output."""
LARGEST_SEED = 2**63 - 1 - MOST_COMPLETIONS
LEAST_TEMPERATURE = 0.01
"""vLLM replaces what lies between 0 and this by this."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[tuple[StopString, ...], Field(max_length=64, fail_fast=True)]
StopTokens = Annotated[tuple[int, ...], Field(max_length=64, fail_fast=True)]
"""With ``min_tokens``, vLLM's GPU runner has room for 128, the model's own ends of sequence among them, and dies of
more."""


class StructuredOutputs(Frozen):
    """What a completion must look like, under vLLM's names; exactly one of them.

    Tokens that would break it are ruled out as each token is drawn. A completion that is cut short then starts anew:
    vLLM would not know how far into the structure it was.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: str | None = Field(default=None, min_length=1, max_length=LONGEST_GRAMMAR)
    """A regular expression that the whole completion matches."""
    choice: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """One of these."""
    grammar: str | None = Field(default=None, min_length=1, max_length=LONGEST_GRAMMAR)
    """A context-free grammar in EBNF."""
    structural_tag: str | None = Field(default=None, min_length=1, max_length=LONGEST_GRAMMAR)
    """xgrammar's structural tags, as JSON text."""

    @model_validator(mode="after")
    def _one_and_not_too_long(self) -> Self:
        given = list(self.model_dump(exclude_none=True))
        if len(given) != 1:
            raise ValueError(f"give one of json, json_object, regex, choice, grammar, structural_tag, not {given}")
        nchars = len(self.model_dump_json())
        if nchars > LONGEST_GRAMMAR:
            raise ValueError(f"{given[0]} has {nchars} characters, and at most {LONGEST_GRAMMAR} are taken: shorten it")
        return self


def without_idle_nulls(model: type[BaseModel], data: object) -> object:
    """``data`` without the nulls that ask for nothing: clients send them for whatever they leave at its default.

    Those of fields that the model does not have, and of fields for which null is no value.
    """
    if not isinstance(data, dict):
        return data
    nullable = _nullable(model)
    return {name: value for name, value in data.items() if value is not None or name in nullable}


def without_repetition(data: object) -> object:
    """``data`` without ``extra_body`` where that repeats what stands beside it, as rllm-model-gateway 0.1.0 sends it.

    Raises ValueError for one that says more: OpenAI's SDK sends the fields of an argument of that name themselves.
    """
    if not isinstance(data, dict) or not isinstance(extra := data.get("extra_body"), dict):
        return data
    if any(name not in data or data[name] != value for name, value in extra.items()):
        raise ValueError("extra_body is no field of a request: send what is in it beside the other fields")
    return {name: value for name, value in data.items() if name != "extra_body"}


@functools.cache
def _nullable(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(name for name, field in model.model_fields.items() if type(None) in get_args(field.annotation))


def refuse_many_unknown(known: Collection[str], data: object) -> object:
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
    logprobs: int | None = Field(default=0, ge=0)
    """How many of the likeliest tokens come back with each token, with their logprobs; at most 20, or
    ``engine.extra.max_logprobs``. The sampled token's always comes back."""
    prompt_logprobs: int | None = Field(default=None, ge=0)
    """The same for the tokens of the prompt, at temperature 1 and with nothing cut off; None: not even their own."""
    logit_bias: Annotated[dict[int, Finite], Field(max_length=MOST_BIASED)] | None = None
    """Token id → what is added to its logit, between -100 and 100."""
    structured_outputs: StructuredOutputs | None = None
    """What a completion must look like."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. ``token_ids`` have them in any case."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text, where the tokenizer knows of such."""
    include_stop_str_in_output: bool = False
    """Leave the stop string that ended a completion in its text. ``token_ids`` have it in any case."""
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)
    """From which token of the prompt on routed experts come back, at most the prompt's length: those before it are
    known from an earlier turn. A deployment with ``engine.return_routed_experts`` returns them to whoever gives it;
    others ignore it. None: from the first, for a request with ``return_routed_experts``."""

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's own at this temperature: from a part of
        the vocabulary, over which their logprobs are renormalized, or from biased logits.

        vLLM ignores ``top_p``, ``top_k`` and ``min_p`` at temperature 0. ``min_tokens`` rules out what would end a
        completion too soon.
        """
        cut_off = self.top_p < 1 or self.top_k >= 1 or self.min_p > 0
        steered = self.structured_outputs is not None or bool(self.logit_bias)
        return self.min_tokens > 0 or steered or (self.temperature > 0 and cut_off)

    @model_validator(mode="before")
    @classmethod
    def _few_are_unknown(cls, data: object) -> object:
        return refuse_many_unknown(cls.model_fields, without_idle_nulls(cls, data))

    @field_validator("seed")
    @classmethod
    def _none_for_minus_one(cls, seed: int | None) -> int | None:
        # vLLM's own, which it replaces itself: a rest would get a seed made of it, the same for every request
        return None if seed == -1 else seed

    @field_validator("logit_bias")
    @classmethod
    def _as_openai_bounds_it(cls, bias: dict[int, float] | None) -> dict[int, float] | None:
        wrong = {token: value for token, value in (bias or {}).items() if not -100 <= value <= 100}
        if wrong:
            raise ValueError(f"{wrong}: a bias lies between -100 and 100")
        return bias

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


class ExtraArgs(Frozen):
    """Arguments that other servers add to vLLM's sampling parameters."""

    prl_compact_logprobs: bool = False
    """prime-rl's: ``compact_logprobs`` of each choice has all logprobs as packed numbers, in place of ``logprobs``."""


class Sampling(CommonSampling):
    """Sampling parameters under vLLM's names. Fields that vLLM has and we do not implement are refused."""

    stop: StopStrings = ()
    """Strings that end a completion; the model needs a tokenizer."""
    stop_token_ids: StopTokens = ()
    """Tokens that end a completion, beside the model's own end of sequence."""
    detokenize: bool = True
    """vLLM's; a request's ``output_mode`` says whether text comes back."""
    output_kind: Literal[2] = 2
    """vLLM's FINAL_ONLY: one reply, when all is done."""
    extra_args: ExtraArgs | None = None
    """What ``/inference/v1/generate`` takes under this name; engines do not see it."""


class Reasoning(Frozen):
    """What an engine needs to know of a prompt whose model reasons first: structured outputs begin after that."""

    ended: bool | None = None
    """Whether the prompt ends after it; None: the engine's reasoning parser looks."""
    parser_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Of the engine's reasoning parser, as of the gateway's."""


class GenerateCall(Frozen):
    """What the gateway hands to an engine replica: one prompt, validated."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    """Of what is to be made: ``max_tokens`` and ``min_tokens`` are what is left of them."""
    partial_tokens: int = Field(default=0, ge=0)
    """So many tokens at the prompt's end are the completion's own first ones, made by an earlier generation: penalties
    count them, and a stop string may begin among them."""
    min_weight_version: WeightVersion | None = None
    """Only weights at least this new may answer."""
    session_id: str | None = None
    """Calls of one session go to one replica while it lives, whose prefix cache has what they share."""
    priority: int = 0
    """vLLM's: lower is earlier."""
    reasoning: Reasoning | None = None
    """With ``sampling.structured_outputs`` only."""
    cache_salt: str | None = None
    """Only prompts of the same salt share what the prefix cache holds."""
    origin: str = ""
    """The gateway that sends it, which knows itself what it has in flight where."""
    number: int = 0
    """Which of that gateway's calls it is, for ``protocol/progress.py``; 0: nobody asks what it has made so far."""
    live: bool = False
    """Somebody reads along."""
    avoid: tuple[str, ...] = ()
    """Replicas that refused or lost this call: others first."""
