"""Sampling parameters of a request. Needs neither torch, vllm nor ray.

The bounds lie within those of vLLM 0.32: vLLM accepts every valid value here unchanged (a test compares them). Values
are refused here if vLLM would replace them, or if its engine would fail on them after its own checks.
"""

import functools
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator, model_validator

from rollout_service.protocol.adapters import WantedAdapter
from rollout_service.protocol.base import Frozen, WeightVersion, refuse_bool, takes_numbers

Finite = Annotated[float, Field(allow_inf_nan=False)]
MOST_COMPLETIONS = 4096
"""Maximum number of completions of one request, over all its prompts."""
MAX_BIASED = 300
"""Maximum number of tokens with a ``logit_bias``, the same as OpenAI's."""
LONGEST_GRAMMAR = 1 << 16
"""Maximum length in characters of a structured output's description."""
LARGEST_SEED = 2**63 - 1 - MOST_COMPLETIONS
LARGEST_VOCABULARY = 1 << 24
"""More tokens than any model has. AReaL sends ``top_k=100000000`` for all tokens."""
MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0: vLLM replaces values between 0 and this one by this one."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[tuple[StopString, ...], Field(max_length=64, fail_fast=True)]
StopTokens = Annotated[tuple[StrictInt, ...], Field(max_length=64, fail_fast=True)]
"""Token ids that end a completion. With ``min_tokens``, vLLM's GPU runner has room for 128, including the model's own
ends of sequence, and crashes on more."""


class StructuredOutputs(Frozen):
    """A constraint on the structure of a completion, under vLLM's names; exactly one field is set.

    Tokens that would violate it are masked in each decode step. An interrupted completion starts anew, because vLLM
    would not know its position in the structure.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    json_object: Literal[True] | None = None
    """Any JSON object."""
    regex: str | None = Field(default=None, min_length=1, max_length=LONGEST_GRAMMAR)
    """A regular expression that the whole completion matches."""
    choice: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """One of these strings."""
    grammar: str | None = Field(default=None, min_length=1, max_length=LONGEST_GRAMMAR)
    """A context-free grammar in EBNF."""
    structural_tag: str | None = Field(default=None, min_length=1, max_length=LONGEST_GRAMMAR)
    """xgrammar's structural tags, as JSON text."""

    @model_validator(mode="before")
    @classmethod
    def _without_idle_options(cls, data: object) -> object:
        # clients that send vLLM's own class send the defaults of options that are not implemented here
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and value is not False}

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
    """Return ``data`` without nulls that have no effect: clients send null for fields that they leave at the default.

    Removes nulls of unknown fields and of fields that do not accept null.
    """
    if not isinstance(data, dict):
        return data
    nullable = _nullable(model)
    return {name: value for name, value in data.items() if value is not None or name in nullable}


def without_repetition(data: object) -> object:
    """Return ``data`` without an ``extra_body`` that repeats its other fields, as rllm-model-gateway 0.1.0 sends it.

    Raises ValueError if ``extra_body`` has more: OpenAI's SDK sends the contents of that argument as fields of their
    own.
    """
    if not isinstance(data, dict) or not isinstance(extra := data.get("extra_body"), dict):
        return data
    if any(name not in data or data[name] != value for name, value in extra.items()):
        raise ValueError("extra_body is no field of a request: send what is in it beside the other fields")
    return {name: value for name, value in data.items() if name != "extra_body"}


@functools.cache
def _nullable(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(name for name, field in model.model_fields.items() if type(None) in get_args(field.annotation))


class CommonSampling(Frozen):
    """Sampling parameters that every data route takes under vLLM's names and in vLLM's form."""

    n: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    """Number of completions of the prompt."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a completion in tokens; None: the remaining context."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum length of a completion in tokens."""
    temperature: Finite = Field(default=1.0, ge=0.0, le=2.0)
    """Temperature; 0 is greedy, other values are at least 0.01."""
    top_p: Finite = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: probability of the tokens to sample from. Below 1, the returned logprobs are renormalised over
    the kept tokens."""
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    """Number of most likely tokens to sample from; 0 or -1: all tokens."""
    min_p: Finite = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum probability of a token, as a share of the most likely token's."""
    repetition_penalty: Finite = Field(default=1.0, ge=0.01, le=100.0)
    """Factor against repeated tokens; 1: none. Logits are multiplied and divided by it in fp32 and must stay finite."""
    presence_penalty: Finite = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from the logit of every token that the completion has; 0: none."""
    frequency_penalty: Finite = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each time that the completion has it; 0: none."""
    seed: int | None = Field(default=None, ge=-(2**63), le=LARGEST_SEED)
    """Seed that makes this request's samples repeatable on one replica; -1: none. Completion ``i`` has ``seed +
    i``, which must fit 64 bits."""
    ignore_eos: bool = False
    """Continue after the end of sequence."""
    logprobs: int | None = Field(default=0, ge=0)
    """Number of most likely tokens returned for each position, at most ``engine.max_logprobs``. The
    sampled token's logprob is always returned."""
    prompt_logprobs: int | None = Field(default=None, ge=0)
    """The same for the tokens of the prompt, at temperature 1 and without truncation. None: no prompt logprobs."""
    logit_bias: Annotated[dict[int, Finite], Field(max_length=MAX_BIASED)] | None = None
    """Token id → value added to its logit, between -100 and 100."""
    structured_outputs: StructuredOutputs | None = None
    """A constraint on the structure of each completion."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. ``token_ids`` contain them in any case."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text, if the tokenizer supports it."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended a completion in its text. ``token_ids`` contain it in any case."""
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)
    """First prompt token whose routed experts are returned, at most the prompt's length. Earlier tokens are known from
    a previous turn. Setting it requests routed experts from a deployment with ``engine.return_routed_experts``; others
    ignore it. None: token 0, for a request with ``return_routed_experts``."""

    @property
    def is_truncated(self) -> bool:
        """Return True if tokens are not sampled from the model's own distribution at this temperature.

        This is the case for a part of the vocabulary, over which logprobs are renormalized, and for biased logits. vLLM
        ignores ``top_p``, ``top_k`` and ``min_p`` at temperature 0. ``min_tokens`` masks tokens that would end a
        completion too early.
        """
        cut_off = self.top_p < 1 or 1 <= self.top_k < LARGEST_VOCABULARY or self.min_p > 0
        steered = self.structured_outputs is not None or bool(self.logit_bias)
        return self.min_tokens > 0 or steered or (self.temperature > 0 and cut_off)

    @model_validator(mode="before")
    @classmethod
    def _without_idle_nulls(cls, data: object) -> object:
        return without_idle_nulls(cls, data)

    @field_validator("seed")
    @classmethod
    def _none_for_minus_one(cls, seed: int | None) -> int | None:
        # vLLM also treats -1 as none, but a continuation would derive a seed from it, the same for every request
        return None if seed == -1 else seed

    @field_validator("logit_bias")
    @classmethod
    def _as_openai_bounds_it(cls, bias: dict[int, float] | None) -> dict[int, float] | None:
        wrong = {token: value for token, value in (bias or {}).items() if not -100 <= value <= 100}
        if wrong:
            raise ValueError(f"{wrong}: a bias lies between -100 and 100: limit it")
        return bias

    @model_validator(mode="after")
    def _not_almost_greedy(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g} is below {MIN_TEMPERATURE:g}, which vLLM would use instead: "
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
    """prime-rl's option: each choice has ``compact_logprobs``, all logprobs as packed numbers, in place of
    ``logprobs``."""


class Sampling(CommonSampling):
    """Sampling parameters under vLLM's names. vLLM's other parameters are refused."""

    stop: StopStrings = ()
    """Strings that end a completion, or one string; the model needs a tokenizer."""
    stop_token_ids: StopTokens = ()
    """Tokens that end a completion, in addition to the model's own end of sequence."""
    detokenize: bool = True
    """vLLM's parameter, without effect: ``output_mode`` of the request selects text."""
    output_kind: Literal[2] = 2
    """vLLM's FINAL_ONLY: one reply, at the end."""
    extra_args: ExtraArgs | None = None
    """Extra arguments of ``/inference/v1/generate``; engines do not see them."""

    # not CommonSampling: clients of /v1/completions send booleans, such as logprobs=true, which vLLM reads as 1
    _no_booleans = field_validator(
        *(name for name, field in CommonSampling.model_fields.items() if takes_numbers(field.annotation)), mode="before"
    )(refuse_bool)

    @field_validator("stop", mode="before")
    @classmethod
    def _as_strings(cls, stop: object) -> object:
        return (stop,) if isinstance(stop, str) else stop


class Scoring(Frozen):
    """The part of a prompt that is scored, see ``ScoreRequest``."""

    start: int
    target_token_ids: tuple[tuple[int, ...], ...] | None = None


class Reasoning(Frozen):
    """Reasoning state of a prompt for an engine: structured outputs begin after the model's reasoning."""

    ended: bool | None = None
    """True if reasoning has ended within the prompt; None: the engine's reasoning parser decides."""
    parser_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reasoning parser, the same in engine and gateway."""


class GenerateCall(Frozen):
    """A call from the gateway to an engine replica: one prompt, validated."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    """Sampling parameters of the remaining tokens: ``max_tokens`` and ``min_tokens`` are what is left of them."""
    partial_tokens: int = Field(default=0, ge=0)
    """Number of tokens at the prompt's end that an earlier generation of this completion made. Penalties count them,
    and a stop string may begin among them."""
    min_weight_version: WeightVersion | None = None
    """The oldest weight version that may answer."""
    exact_weight_version: WeightVersion | None = None
    """The only weight version that may answer."""
    adapter: WantedAdapter | None = None
    """The adapter that samples; None: the model itself."""
    session_id: str | None = None
    """Calls of one session go to one replica while it lives, to share its prefix cache."""
    priority: int = 0
    """vLLM's priority: a lower value is scheduled earlier."""
    scoring: Scoring | None = None
    """Return ``Completion.scores`` of the prompt instead of ``prompt_logprobs``."""
    reasoning: Reasoning | None = None
    """Only with ``sampling.structured_outputs``."""
    cache_salt: str | None = None
    """Only prompts with the same salt share entries of the prefix cache."""
    origin: str = ""
    """The gateway that sends the call; a gateway counts its own calls in flight itself."""
    number: int = 0
    """Number of the call in that gateway, for ``protocol/progress.py``; 0: its progress is not polled."""
    live: bool = False
    """True if a client streams the completion."""
    avoid: tuple[str, ...] = ()
    """Replicas that refused or lost this call; other replicas are preferred."""
