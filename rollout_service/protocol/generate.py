"""``POST /inference/v1/generate``: vLLM's request and reply as far as they are implemented, with our additions."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, StrictInt, field_validator, model_validator

from rollout_service.errors import InvalidRequest
from rollout_service.protocol.base import Frozen, KnownVersion, WeightVersion, refuse_bool
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, OnAbort, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import CommonSampling, Sampling, without_idle_nulls

TokenIds = Annotated[tuple[StrictInt, ...], Field(fail_fast=True)]
"""Token ids. Validation stops at the first invalid one: pydantic would make an error of each of millions."""
ModelName = Annotated[str, Field(max_length=1024)]


class WantedVersion(Frozen):
    """The weight version that may answer, as miles's contract for external rollout services names it.

    Both fields take a number or a label. If no replica qualifies, the request fails with 409 and ``Retry-After``.
    """

    min_version: KnownVersion | None = None
    """This version or a newer one, see ``RolloutOptions.min_weight_version``."""
    exact_version: KnownVersion | None = None
    """This version only, for every token. A label is looked up once. A completion that an update interrupts continues
    on a replica that still serves the version, or comes back with ``finish_reason="abort"``."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.min_version is not None and self.exact_version is not None:
            raise ValueError("min_version and exact_version are given: send one of them")
        return self


class RolloutOptions(Frozen):
    """Options that both data routes share: which replica and which weight versions may answer, and how."""

    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    """The rollout's name in logs."""
    min_weight_version: KnownVersion | None = None
    """The oldest weight version that may answer, by number or label. The request waits up to ``engine.version_wait_s``
    for it, then fails with 425. A label that no version has yet is 404."""
    weight_version: WantedVersion | None = None
    """``{"exact_version": …}`` or ``{"min_version": …}``, by number or label. 409 if no replica serves it."""
    adapter: str | None = Field(default=None, min_length=1, max_length=160)
    """The LoRA adapter that samples: ``run-a`` is its newest version, ``run-a@3`` exactly that one. An unknown adapter
    is 404. A completion keeps the version that it begins with."""
    min_adapter_version: WeightVersion | None = None
    """The oldest version of the adapter that may answer. The request waits up to ``engine.version_wait_s`` for it, then
    fails with 425."""
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Requests of one session go to one replica while it lives. Also accepted as header ``X-Session-Id``."""
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    """vLLM's priority: a lower value is scheduled earlier."""
    on_abort: OnAbort = "continue"
    """Fate of a completion that an update, a pause or a lost replica interrupts. ``continue``: another replica
    continues it. ``return``: it is returned with ``finish_reason="abort"``."""

    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Only requests with the same salt share entries of the prefix cache. None are shared over an update, except within
    a session with ``weights.kv_cache_on_update: keep``."""
    return_routed_experts: bool = False
    """Return ``routed_experts`` with each choice: see ``RoutedExperts``. The deployment needs
    ``engine.return_routed_experts``."""

    @model_validator(mode="before")
    @classmethod
    def _without_idle_nulls(cls, data: object) -> object:
        return without_idle_nulls(cls, data)

    @model_validator(mode="after")
    def _one_form_of_the_version(self) -> Self:
        if self.min_weight_version is not None and self.weight_version not in (None, WantedVersion()):
            raise ValueError("min_weight_version and weight_version are given: send one of them")
        return self

    @model_validator(mode="after")
    def _adapter_has_the_version(self) -> Self:
        if self.min_adapter_version is not None and (self.adapter is None or "@" in self.adapter):
            raise ValueError("min_adapter_version needs an adapter without an exact version: name it, without @")
        return self

    @property
    def min_version(self) -> int | str | None:
        """The oldest version that may answer, in either form."""
        if self.weight_version is None or self.min_weight_version is not None:
            return self.min_weight_version
        return self.weight_version.min_version

    @property
    def exact_version(self) -> int | str | None:
        """The only version that may answer."""
        return None if self.weight_version is None else self.weight_version.exact_version

    def options(self, session_header: str | None) -> "RolloutOptions":
        """Return only these fields, with the session from the body or the header. Raises InvalidRequest if both
        differ."""
        if session_header and self.session_id and session_header != self.session_id:
            raise InvalidRequest(
                f"session_id={self.session_id!r} and {session_header!r} of X-Session-Id or the URL differ: send one"
            )
        fields = {name: getattr(self, name) for name in RolloutOptions.model_fields}
        return RolloutOptions(**{**fields, "session_id": self.session_id or session_header or None})


class StreamOptions(Frozen):
    """OpenAI's and vLLM's options of a request with ``stream``."""

    include_usage: bool | None = False
    """Send a last chunk with ``usage`` and without choices."""
    continuous_usage_stats: bool | None = False
    """Send the usage so far of its choice in each chunk."""


def require_stream(stream: bool | None, options: StreamOptions | None, sampling: CommonSampling, experts: bool) -> None:
    """Raise ValueError for options that cannot be combined. ``experts``: the request's ``return_routed_experts``."""
    if options is not None and not stream:
        raise ValueError("stream_options are for stream=true: leave them out")
    if stream and sampling.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs have no place in a stream: leave out one of them")
    if stream and experts:
        raise ValueError("routed experts are known when a completion has ended, not in a stream: leave out one of them")


class GenerateRequest(RolloutOptions):
    """vLLM's ``GenerateRequest`` as far as it is implemented, plus ``prompt`` and the fields of ``RolloutOptions``."""

    token_ids: TokenIds | None = None
    """The prompt, as token ids."""
    prompt: str | None = None
    """Text instead of ``token_ids``; the reply then has the prompt's token ids."""
    add_special_tokens: bool | None = None
    """Add special tokens to ``prompt``, such as a beginning of sequence. None: add them, but no second beginning of
    sequence to a text that has one, as chat templates write it."""
    sampling_params: Sampling = Sampling()
    """The sampling parameters."""
    model: ModelName | None = None
    """A name of the served model. None: any."""
    output_mode: Literal["tokens", "text"] = "tokens"
    """``text`` adds the text of each completion."""
    flat_logprobs: bool = False
    """Return a choice's ``logprobs`` as one list beside its ``token_ids``. It has half the bytes, and an eighth of the
    work to parse. Our client sets it; vLLM's clients do not know it."""
    partial_token_ids: TokenIds = ()
    """Tokens of the completion that an earlier request has generated. The completion continues after them, and the
    reply has only the new tokens. ``sampling_params`` apply to the whole completion: ``max_tokens``, ``min_tokens`` and
    penalties count these tokens, and a stop string may begin among them. The reply's text includes their text; its
    ``usage`` counts them as prompt."""
    return_token_ids: bool = False
    """Repeat the prompt's token ids in the reply."""
    stream: bool | None = False
    """Send server-sent events during generation: see ``GenerateChunk``."""
    stream_options: StreamOptions | None = None
    """Options of a stream: ``include_usage``, ``continuous_usage_stats``."""

    _no_booleans = field_validator("priority", mode="before")(refuse_bool)

    @model_validator(mode="after")
    def _ids_or_text(self) -> "GenerateRequest":
        if (self.token_ids is None) == (self.prompt is None):
            raise ValueError("give either token_ids or prompt")
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> "GenerateRequest":
        sampling = self.sampling_params
        if not self.partial_token_ids:
            return self
        if sampling.n > 1:
            raise ValueError(f"partial_token_ids belong to one completion, but n={sampling.n}: send a request for each")
        if sampling.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not computed with partial_token_ids: leave one of them out")
        if self.return_routed_experts or sampling.routed_experts_prompt_start is not None:
            raise ValueError(
                "routed experts of partial_token_ids are unknown: leave out partial_token_ids, or "
                "return_routed_experts and routed_experts_prompt_start"
            )
        if sampling.max_tokens is not None and len(self.partial_token_ids) >= sampling.max_tokens:
            raise ValueError(
                f"partial_token_ids has {len(self.partial_token_ids)} tokens, and max_tokens={sampling.max_tokens} "
                "counts them, too: raise it"
            )
        return self

    @property
    def compact_logprobs(self) -> bool:
        """Return True if the reply has ``compact_logprobs``."""
        extra = self.sampling_params.extra_args
        return extra is not None and extra.prl_compact_logprobs

    @model_validator(mode="after")
    def _streams(self) -> "GenerateRequest":
        if self.stream and self.compact_logprobs:
            raise ValueError("extra_args.prl_compact_logprobs: only a whole reply has them; leave out one of the two")
        require_stream(self.stream, self.stream_options, self.sampling_params, self.return_routed_experts)
        return self


class PromptTokens(BaseModel):
    """Details of a prompt's tokens."""

    cached_tokens: int
    """See ``Rollout.cached_tokens``."""


class Usage(BaseModel):
    """Token counts of prompts and of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    """None: the prefix cache had no token of the prompts."""


class CandidateLogprob(BaseModel):
    """A candidate token at a position."""

    token_id: int
    token: str
    logprob: FiniteFloat
    rank: int


class TokenLogprob(BaseModel):
    """A sampled token in the form of vLLM 0.32, and in the older form that released clients still read."""

    token_id: int
    token: str
    """``token_id:N``, the form before vLLM 0.32."""
    logprob: FiniteFloat
    top_logprobs: list[CandidateLogprob] = []
    """The sampled token first, then the most likely other tokens."""


class TokenLogprobs(BaseModel):
    """Logprobs in vLLM's form."""

    content: list[TokenLogprob]


class PromptLogprob(BaseModel):
    """The logprob of a token of the prompt, or of an alternative at its position."""

    logprob: FiniteFloat
    rank: int


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's form: a dict per prompt token, by token id, with its own logprob and the top-k ones; None for the first token.
"""


class GenerateChoice(BaseModel):
    """One completion."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: Annotated[tuple[FiniteFloat, ...] | TokenLogprobs | None, Field(union_mode="left_to_right")]
    """One list with ``flat_logprobs``; None with ``compact_logprobs``."""
    compact_logprobs: CompactLogprobs | None = None
    """Present with ``sampling_params.extra_args.prl_compact_logprobs``."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    weight_versions: tuple[Span, ...]
    text: str | None = None
    top_logprobs: tuple[tuple[Candidate, ...], ...] | None = None
    """Present with ``flat_logprobs`` and ``sampling_params.logprobs`` above 0: see ``Completion``."""
    packed_sampling_mask: tuple[str, ...] | None = None
    """See ``Completion``. vLLM's own form is several times as long."""
    routed_experts: RoutedExperts | None = None
    """See ``RolloutOptions.return_routed_experts``."""

    def completion(self) -> Completion:
        """Return the choice as a Completion. Raises ValueError if tokens, logprobs and spans do not match."""
        logprobs = self.logprobs
        if logprobs is None:
            raise ValueError("logprobs are missing")
        if isinstance(logprobs, TokenLogprobs):
            logprobs = tuple(token.logprob for token in logprobs.content)
        return Completion(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spans=self.weight_versions,
            text=self.text,
            top_logprobs=self.top_logprobs,
            packed_sampling_mask=self.packed_sampling_mask,
            routed_experts=self.routed_experts,
        )


class GenerateReply(BaseModel):
    """Reply of the native route. The gateway does not validate it, since that would double the cost of each token."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"] = "tokens"
    choices: list[GenerateChoice]
    usage: Usage
    replica_id: str
    attempts: int = Field(default=1, ge=1)
    truncated_sampling: bool = False
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class GenerateChunk(BaseModel):
    """An event of a stream: new tokens of one completion, or, without choices, fields of the whole reply.

    A choice's ``weight_versions`` are those of the chunk's tokens, counted from the completion's first token. The last
    chunk of a completion (with ``finish_reason``) has the spans of the whole completion, like vLLM's.
    """

    request_id: str
    output_mode: Literal["tokens", "text"] = "tokens"
    choices: list["StreamedChoice"]
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt's token ids, in the first chunk, if the reply would have them."""
    usage: Usage | None = None
    replica_id: str | None = None
    """This field and the next two are in the last chunk, with ``stream_options.include_usage``."""
    attempts: int | None = None
    truncated_sampling: bool | None = None


class StreamedChoice(BaseModel):
    """New tokens of one completion."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: Annotated[tuple[FiniteFloat, ...] | TokenLogprobs, Field(union_mode="left_to_right")]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    weight_versions: tuple[Span, ...]
    text: str | None = None
    top_logprobs: tuple[tuple[Candidate, ...], ...] | None = None
    packed_sampling_mask: tuple[str, ...] | None = None
