"""``POST /inference/v1/generate``: vLLM's request and reply, as far as they are implemented, and what we add."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, FiniteFloat, StrictInt, model_validator

from rollout_service.errors import InvalidRequest
from rollout_service.protocol.base import Frozen, KnownVersion
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, OnAbort, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import CommonSampling, Sampling, refuse_many_unknown, without_idle_nulls

TokenIds = Annotated[tuple[StrictInt, ...], Field(fail_fast=True)]
"""Fails at the first that is none: a body has room for millions, and pydantic would make an error of each."""
ModelName = Annotated[str, Field(max_length=1024)]


class RolloutOptions(Frozen):
    """What a request of either data route may say about where and when it is answered."""

    request_id: str | None = Field(default=None, min_length=1, max_length=256)
    """The rollout's name in logs."""
    min_weight_version: KnownVersion | None = None
    """Only weights committed with this version, given by number or label, or later may answer; they are waited for
    ``engine.version_wait_s``, then 425. A label that no version has yet is 404."""
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Requests of one session go to one replica while it lives. Or as header ``X-Session-Id``."""
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    """vLLM's: a lower one is scheduled earlier."""
    on_abort: OnAbort = "continue"
    """``return``: a completion that an update, a pause or a lost replica cuts short comes back as it is, with
    ``finish_reason="abort"``, instead of going on elsewhere."""

    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Only requests of the same salt share what the prefix cache holds. A new weight version empties it anyway."""
    return_routed_experts: bool = False
    """Tell which experts each token went to: ``routed_experts`` of each choice, see ``RoutedExperts``. The deployment
    needs ``engine.return_routed_experts``."""

    @model_validator(mode="before")
    @classmethod
    def _few_names_are_unknown(cls, data: object) -> object:
        return refuse_many_unknown(cls.model_fields, without_idle_nulls(cls, data))

    def options(self, session_header: str | None) -> "RolloutOptions":
        """These fields alone, the session from wherever it was named. Raises InvalidRequest for two sessions."""
        if session_header and self.session_id and session_header != self.session_id:
            raise InvalidRequest(
                f"session_id={self.session_id!r} and the header X-Session-Id: {session_header!r} differ: send one"
            )
        fields = {name: getattr(self, name) for name in RolloutOptions.model_fields}
        return RolloutOptions(**{**fields, "session_id": self.session_id or session_header or None})


class StreamOptions(Frozen):
    """OpenAI's and vLLM's, of a request with ``stream``."""

    include_usage: bool | None = False
    """A last chunk without choices has ``usage``."""
    continuous_usage_stats: bool | None = False
    """Each chunk has the usage so far, of its choice."""


def require_stream(stream: bool | None, options: StreamOptions | None, sampling: CommonSampling, experts: bool) -> None:
    """Raise ValueError for what does not go together. ``experts``: ``return_routed_experts``."""
    if options is not None and not stream:
        raise ValueError("stream_options are for stream=true: leave them out")
    if stream and sampling.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs have no place in a stream: leave out one of them")
    if stream and experts:
        raise ValueError("routed experts are known when a completion has ended, not in a stream: leave out one of them")


class GenerateRequest(RolloutOptions):
    """vLLM's ``GenerateRequest``, as far as it is implemented, plus ``prompt`` and what ``RolloutOptions`` adds."""

    token_ids: TokenIds | None = None
    prompt: str | None = None
    """Text instead of ``token_ids``; the reply then names the ids it became."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens to ``prompt``, such as a beginning of sequence. None: it does, but no
    second beginning of sequence to a text that begins with one, as chat templates write it."""
    sampling_params: Sampling = Sampling()
    model: ModelName | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    """``text`` adds each completion's text."""
    flat_logprobs: bool = False
    """A choice's ``logprobs`` as one list, beside its ``token_ids``: half the bytes, an eighth of the work to read
    them. Our client asks for it; vLLM's do not know it."""
    partial_token_ids: TokenIds = ()
    """What an earlier request has made of the completion: it goes on from these tokens, and the reply has those that
    come after them. ``sampling_params`` are of all of the completion: ``max_tokens``, ``min_tokens`` and penalties
    count these tokens, and a stop string may begin among them. The reply's text begins with theirs; its ``usage``
    counts them as prompt."""
    return_token_ids: bool = False
    """Repeat the prompt's ids in the reply."""
    stream: bool | None = False
    """Server-sent events, while it is made: see ``GenerateChunk``."""
    stream_options: StreamOptions | None = None
    detach: bool = False
    """Answer at once, with the id by which ``GET /v1/rollouts/{id}`` collects the reply: ``request_id`` if given."""

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
            raise ValueError(f"partial_token_ids are of one completion, and n={sampling.n}: send a request for each")
        if sampling.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come with a completion's beginning: leave them or partial_token_ids out")
        if self.return_routed_experts or sampling.routed_experts_prompt_start is not None:
            raise ValueError(
                "to which experts the tokens of partial_token_ids went is not known to who goes on from them: leave "
                "out partial_token_ids, or return_routed_experts and routed_experts_prompt_start"
            )
        if sampling.max_tokens is not None and len(self.partial_token_ids) >= sampling.max_tokens:
            raise ValueError(
                f"partial_token_ids has {len(self.partial_token_ids)} tokens, and max_tokens={sampling.max_tokens} "
                "counts them, too: raise it"
            )
        return self

    @property
    def compact_logprobs(self) -> bool:
        """Whether the reply has ``compact_logprobs``."""
        extra = self.sampling_params.extra_args
        return extra is not None and extra.prl_compact_logprobs

    @model_validator(mode="after")
    def _streams(self) -> "GenerateRequest":
        if self.stream and self.compact_logprobs:
            raise ValueError("extra_args.prl_compact_logprobs: only a whole reply has them; leave out one of the two")
        require_stream(self.stream, self.stream_options, self.sampling_params, self.return_routed_experts)
        if self.stream and self.detach:
            raise ValueError("a rollout is either streamed or detached: leave out stream or detach")
        return self


class Usage(BaseModel):
    """Tokens of prompts and of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CandidateLogprob(BaseModel):
    """A token that might have been sampled."""

    token_id: int
    token: str
    logprob: FiniteFloat
    rank: int


class TokenLogprob(BaseModel):
    """A sampled token: what vLLM 0.32 sends, and what it sent before, which released clients still read."""

    token_id: int
    token: str
    """``token_id:N``, the form of before 0.32."""
    logprob: FiniteFloat
    top_logprobs: list[CandidateLogprob] = []
    """The sampled token first, then the likeliest others."""


class TokenLogprobs(BaseModel):
    """vLLM's form."""

    content: list[TokenLogprob]


class PromptLogprob(BaseModel):
    """A token of the prompt, or one that might stand there."""

    logprob: FiniteFloat
    rank: int


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's form: for each token of the prompt but the first, by token id, its own and the likeliest ones."""


class CompactLogprobs(BaseModel):
    """All logprobs of a completion as packed numbers, as renderers 0.1.13.dev17 reads them for prime-rl.

    Token ``i`` has the entries ``offsets[i]`` to ``offsets[i + 1]``: the sampled token, then the likeliest others.
    """

    data: str
    """Base64 of the token id of each entry (u32, little endian), then of the logprob of each (f32, little endian).
    The first field: the client searches the reply's bytes for its name."""
    format: Literal["u32-f32-le-v1"] = "u32-f32-le-v1"
    offsets: list[int]
    """[tokens + 1]"""
    num_top_logprobs: int
    """``sampling_params.logprobs`` of the request."""


class GenerateChoice(BaseModel):
    """One completion."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: Annotated[tuple[FiniteFloat, ...] | TokenLogprobs | None, Field(union_mode="left_to_right")]
    """One list with ``flat_logprobs``; None with ``compact_logprobs``."""
    compact_logprobs: CompactLogprobs | None = None
    """With ``sampling_params.extra_args.prl_compact_logprobs``."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    weight_versions: tuple[Span, ...]
    text: str | None = None
    top_logprobs: tuple[tuple[Candidate, ...], ...] | None = None
    """With ``flat_logprobs`` and ``sampling_params.logprobs`` above 0: see ``Completion``."""
    packed_sampling_mask: tuple[str, ...] | None = None
    """See ``Completion``. vLLM's own form is several times as long."""
    routed_experts: RoutedExperts | None = None
    """See ``RolloutOptions.return_routed_experts``."""

    def completion(self) -> Completion:
        """Raises ValueError if tokens, logprobs and spans do not match."""
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
    """The gateway makes it without checking it: checking each token again would cost as much as making it."""

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


class DetachedRollout(BaseModel):
    """A rollout that is under way, whoever waits for it."""

    id: str


class GenerateChunk(BaseModel):
    """An event of a stream: more of one completion, or, without choices, what a reply says as a whole.

    A choice's ``weight_versions`` are those of the chunk's tokens, counted from the completion's first token; the chunk
    that ends it (``finish_reason``) has all of the completion's, as vLLM's has.
    """

    request_id: str
    output_mode: Literal["tokens", "text"] = "tokens"
    choices: list["StreamedChoice"]
    prompt_token_ids: tuple[int, ...] | None = None
    """In the first chunk, where the reply would have them."""
    usage: Usage | None = None
    replica_id: str | None = None
    """This and the next two: in the last chunk, with ``stream_options.include_usage``."""
    attempts: int | None = None
    truncated_sampling: bool | None = None


class StreamedChoice(BaseModel):
    """More of one completion."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: Annotated[tuple[FiniteFloat, ...] | TokenLogprobs, Field(union_mode="left_to_right")]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    weight_versions: tuple[Span, ...]
    text: str | None = None
    top_logprobs: tuple[tuple[Candidate, ...], ...] | None = None
    packed_sampling_mask: tuple[str, ...] | None = None
