"""``POST /v1/completions``: OpenAI's completions API with vLLM's extensions for token ids."""

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, model_validator

from rollout_service.fleet.detokenizer import TokenStrings, decoder_of
from rollout_service.fleet.progress import CompletionDelta
from rollout_service.gateway.dependencies import Here, Services, SessionHeader
from rollout_service.gateway.generate import (
    candidates,
    packed_mask,
    prompt_logprobs,
    routed_experts,
    spans,
    token_counts,
    usage,
)
from rollout_service.gateway.openai.routes import IDLE, Name
from rollout_service.gateway.prompts import DATA_ERRORS, check_prompts, model_and_adapter, read_prompts, roll_out_all
from rollout_service.gateway.routes import PromptsRoute
from rollout_service.gateway.streams import (
    EVENT_STREAM,
    Spans,
    TextStream,
    event_stream,
    live_pieces,
    side_by_side,
    token_strings,
)
from rollout_service.protocol.generate import (
    ModelName,
    PromptLogprobs,
    RolloutOptions,
    StreamOptions,
    TokenIds,
    Usage,
    require_stream,
)
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Rollout, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import (
    CommonSampling,
    Sampling,
    StopString,
    StopStrings,
    StopTokens,
    without_repetition,
)

router = APIRouter(tags=["completions"], route_class=PromptsRoute)

Prompt = (
    str
    | TokenIds
    | Annotated[tuple[str, ...], Field(fail_fast=True)]
    | Annotated[tuple[TokenIds, ...], Field(fail_fast=True)]
)


_OF_CHATS = (IDLE - {"prompt_cache_key", "safety_identifier"}) | {
    "chat_template",
    "chat_template_kwargs",
    "include_reasoning",
    "parallel_tool_calls",
    "reasoning_effort",
}
"""Fields that change nothing of a given prompt's completion. rLLM's gateway (9beb6e0, ``proxy.py``) sends later turns
of a chat here, as token ids, with the chat's other fields."""


class CompletionRequest(RolloutOptions, CommonSampling):
    """One or several prompts, as text or token ids, with the sampling parameters as top-level fields."""

    prompt: Prompt
    model: ModelName | None = None
    max_tokens: int | None = Field(default=16, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """OpenAI's newer name of ``max_tokens`` for chats. Some clients send it here, too."""
    logprobs: bool | Annotated[int, Field(ge=0)] | None = None
    """0 or true returns the logprobs of the sampled tokens. A number adds that many top logprobs."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """The number for ``logprobs=true``, as in chats."""
    stop: StopStrings | StopString | None = ()
    stop_token_ids: StopTokens | None = ()
    add_special_tokens: bool | None = None
    """See ``GenerateRequest.add_special_tokens``."""
    return_token_ids: bool | None = False
    """True to add ``token_ids`` and ``prompt_token_ids`` to each choice."""
    return_tokens_as_token_ids: bool | None = False
    """True to write ``token_id:123`` instead of text in ``logprobs.tokens``."""
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    stream: bool | None = False
    """True to stream the completions as server-sent events, see ``CompletionReply``."""
    stream_options: StreamOptions | None = None
    echo: bool | None = False
    """True to put the prompt and its logprobs before each completion; not in a stream."""
    best_of: Literal[1] | None = None
    use_beam_search: Literal[False] | None = False

    @model_validator(mode="before")
    @classmethod
    def _without_a_chats_fields(cls, data: object) -> object:
        data = without_repetition(data)
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if name not in _OF_CHATS}
        if (asked := data.pop("response_format", None)) is not None:
            if data.get("structured_outputs") is not None:
                raise ValueError("response_format and structured_outputs are given: send one of them")
            data["structured_outputs"] = _structured_outputs(asked)
        return data

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        longest, newer = self.max_tokens, self.max_completion_tokens
        if newer is not None and "max_tokens" in self.model_fields_set and longest != newer:
            raise ValueError(f"max_tokens={longest} and max_completion_tokens={newer} differ: send one")
        return self

    @model_validator(mode="after")
    def _streams(self) -> Self:
        require_stream(self.stream, self.stream_options, self, self.return_routed_experts)
        if self.stream and self.echo:
            raise ValueError("echo has no place in a stream: leave out one of them")
        return self

    @property
    def candidates(self) -> int | None:
        """The number of top logprobs per token in the reply. None: no logprobs at all."""
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs

    def sampling(self) -> Sampling:
        """Return the sampling parameters of the request."""
        fields = {name: getattr(self, name) for name in CommonSampling.model_fields}
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if self.echo and self.prompt_logprobs is None:
            fields["prompt_logprobs"] = self.candidates
        ends = {"stop": self.stop or (), "stop_token_ids": self.stop_token_ids or ()}
        return Sampling(**{**fields, "logprobs": self.candidates, **ends})


def _structured_outputs(response_format: object) -> dict[str, object] | None:
    """Return OpenAI's ``response_format`` as ``structured_outputs``. Raises ValueError for another format."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    raise ValueError("response_format is neither text, json_object, nor json_schema with a schema: send one of them")


class CompletionLogprobs(BaseModel):
    """Logprobs in OpenAI's format."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of a prompt."""
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]
    """Logprobs of the token and of the top tokens, by text. Two ids with the same text share one entry."""


class CompletionChoice(BaseModel):
    """One completion, or its new tokens in an event of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    """None until the completion's last event."""
    stop_reason: int | str | None
    weight_versions: list[Span]
    """Indices count from the completion's first token. An event has the spans of its tokens; the last event of a
    completion has all spans."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """In a stream: set in the first event of a choice."""
    packed_sampling_mask: list[str] | None = None
    routed_experts: RoutedExperts | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionReply(BaseModel):
    """Schema of the reply and of a stream's events, for the documentation. Replies are built without it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    """Empty in the last event of a stream, which ``stream_options.include_usage`` requests."""
    usage: Usage | None = None
    attempts: int | None = None
    """In a stream: set in the last event, like ``truncated_sampling``."""
    truncated_sampling: bool | None = None


@router.post(
    "/v1/completions",
    response_model=dict[str, object],
    responses={200: {"model": CompletionReply, **EVENT_STREAM}, **DATA_ERRORS},
)
async def completions(
    body: CompletionRequest, services: Here, x_session_id: SessionHeader = None
) -> dict[str, object] | Response:
    """Complete all prompts. Choice ``i * n + j`` is completion ``j`` of prompt ``i``."""
    model, adapter = await model_and_adapter(body.model, body.adapter, services)
    identity = body.request_id or f"cmpl-{uuid.uuid4().hex}"
    sampling, options = body.sampling(), body.options(x_session_id).model_copy(update={"adapter": adapter})
    prompts = await read_prompts(body.prompt, body.n, services, body.add_special_tokens)
    check_prompts(prompts, sampling, services)
    common = {"id": identity, "object": "text_completion", "created": int(time.time()), "model": model}
    if body.stream:
        return await event_stream(_chunks(prompts, common, body, sampling, options, services))
    names = [f"{identity}-{i}" for i in range(len(prompts))]
    rollouts = await roll_out_all(prompts, sampling, services, options, names)
    choices = []
    for i, rollout in enumerate(rollouts):
        for c in rollout.completions:
            choice = _Choice(i * sampling.n + c.index, rollout.prompt_token_ids, body, sampling, services)
            if body.echo:
                choice.put_prompt(rollout.completions[0].prompt_logprobs)
            choices.append(choice.add(CompletionDelta(c, 0, is_last=True)))
            if body.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = prompt_logprobs(rollout)
    return common | {"choices": choices} | _totals(rollouts, sampling)


async def _chunks(
    prompts: list[tuple[int, ...]],
    common: dict[str, object],
    body: CompletionRequest,
    sampling: Sampling,
    options: RolloutOptions,
    services: Services,
) -> AsyncGenerator[dict[str, object]]:
    """Yield the events of a stream, see ``CompletionReply``."""
    wanted, rollouts = body.stream_options or StreamOptions(), list[Rollout]()
    streams = [
        live_pieces(prompt, sampling, services, options.model_copy(update={"request_id": f"{common['id']}-{i}"}))
        for i, prompt in enumerate(prompts)
    ]
    choices = [_Choice(i, prompts[i // sampling.n], body, sampling, services) for i in range(len(prompts) * sampling.n)]
    async with aclosing(side_by_side(streams)) as pieces:
        async for i, piece in pieces:
            if isinstance(piece, Rollout):
                rollouts.append(piece)
                continue
            choice = choices[i * sampling.n + piece.made.index]
            chunk = common | {"choices": [choice.add(piece)]}
            if wanted.continuous_usage_stats:
                chunk["usage"] = token_counts(len(prompts[i]), piece.start + len(piece.made.token_ids))
            yield chunk
    if wanted.include_usage:
        yield common | {"choices": []} | _totals(rollouts, sampling)


def _totals(rollouts: list[Rollout], sampling: Sampling) -> dict[str, object]:
    """Return the fields that describe all choices."""
    return {
        "usage": usage(rollouts),
        "attempts": max((rollout.attempts for rollout in rollouts), default=1),
        "truncated_sampling": sampling.is_truncated,
    }


_Row = tuple[int, Sequence[Candidate]]
"""A token, and its candidates with itself first; none for a prompt's first token."""


class _Choice:
    """Builds one choice of the reply, or its parts in the events of a stream."""

    def __init__(
        self, index: int, prompt: tuple[int, ...], body: CompletionRequest, sampling: Sampling, services: Services
    ) -> None:
        self._index, self._prompt, self._body = index, prompt, body
        self._text, self._spans = TextStream(prompt, sampling, services.tokenizer), Spans()
        self._names = _names(() if body.echo else prompt, body, services)
        self._characters = 0
        """The number of characters in the token strings so far."""
        self._prompt_text = ""
        if body.echo and services.tokenizer is not None:
            self._prompt_text = decoder_of(services.tokenizer)(prompt, sampling.skip_special_tokens)
        self._prompt_rows: list[_Row] = []

    def put_prompt(self, scored: Sequence[Sequence[Candidate] | None] | None) -> None:
        """Put the prompt before the completion. ``scored``: its ``prompt_logprobs``."""
        rows = scored or (None,) * len(self._prompt)
        self._prompt_rows = [(token, row or ()) for token, row in zip(self._prompt, rows, strict=True)]

    def add(self, piece: CompletionDelta) -> dict[str, object]:
        """Return the choice with the tokens of ``piece``."""
        made = self._spans.of(piece)
        choice: dict[str, object] = {
            "index": self._index,
            "text": self._prompt_text + self._text.add(made, piece.is_last),
            "logprobs": None if self._body.candidates is None else self._logprobs(made),
            "finish_reason": made.finish_reason if piece.is_last else None,
            "stop_reason": made.stop_reason,
            "weight_versions": spans(made),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = made.token_ids
            if piece.start == 0:
                choice["prompt_token_ids"] = self._prompt
        return choice | packed_mask(made) | routed_experts(made)

    def _logprobs(self, made: Completion) -> dict[str, object]:
        """Return logprobs in OpenAI's format."""
        tokens, offsets = list[str](), list[int]()
        logprobs, top = list[float | None](), list[dict[str, float] | None]()
        of_completion = ((row[0].token_id, row) for row in candidates(made))
        for token, row in itertools.chain(self._prompt_rows, of_completion):
            strings = self._names.of_next([candidate.token_id for candidate in row] or [token])
            by_text: dict[str, float] = {}
            for text, candidate in zip(strings, row, strict=False):
                by_text.setdefault(text, candidate.logprob)
            tokens.append(strings[0])
            offsets.append(self._characters)
            logprobs.append(row[0].logprob if row else None)
            top.append(by_text or None)
            self._characters += len(strings[0])
            self._names.add(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "text_offset": offsets, "top_logprobs": top}


class _TokenIds:
    """Names tokens by their ids."""

    def of_next(self, token_ids: Sequence[int]) -> list[str]:
        return [f"token_id:{token}" for token in token_ids]

    def add(self, token_id: int) -> None:
        pass


def _names(prompt: tuple[int, ...], body: CompletionRequest, services: Services) -> TokenStrings | _TokenIds:
    if body.return_tokens_as_token_ids or services.tokenizer is None:
        return _TokenIds()
    return token_strings(prompt, services.tokenizer)
