"""A rollout read as a stream, and what was read of an unfinished one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import httpx
from pydantic import model_validator

from rollout_service.client._generate import body_of, cached_tokens
from rollout_service.client._http import Http, Repeat
from rollout_service.errors import RolloutServiceError, from_wire
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.generate import GenerateChunk, GenerateRequest, StreamedChoice, StreamOptions
from rollout_service.protocol.rollout import Completion, FinishReason, Rollout, Span, merge_spans


class PartialRollout(Frozen):
    """One prompt with its completions so far. ``generate_batch`` accepts it in place of a prompt.

    It is plain data. Use ``model_dump_json`` and ``model_validate_json`` to keep it across a restart of the trainer.
    """

    request_id: str
    prompt: str | None = None
    """The prompt text. None: the prompt was token ids."""
    prompt_token_ids: tuple[int, ...] | None
    """The prompt's token ids. None: the service has not tokenized the text yet."""
    completions: tuple[Completion, ...] = ()
    """The completions so far; empty if there are none. Those with ``finish_reason`` "abort" continue, the others have
    ended and stay unchanged. Their spans name the weight version of each token."""
    attempts: int = 0
    """Number of generations of the most interrupted completion, including an unfinished one."""
    truncated_sampling: bool = False
    """See ``Rollout.truncated_sampling``; it describes the tokens so far."""

    @model_validator(mode="after")
    def _has_a_prompt(self) -> PartialRollout:
        if self.prompt_token_ids is None and (self.prompt is None or self.completions):
            raise ValueError("prompt_token_ids are missing: only a text prompt without tokens may leave them out")
        return self

    @classmethod
    def of(cls, rollout: Rollout, prompt: str | None = None) -> PartialRollout:
        """Return a partial rollout from a rollout with "abort" completions (``on_abort="return"``, or attempts
        exhausted).

        ``prompt``: the prompt text, if text was sent.
        """
        return cls(
            request_id=rollout.request_id,
            prompt=prompt,
            prompt_token_ids=rollout.prompt_token_ids,
            completions=rollout.completions,
            attempts=rollout.attempts,
            truncated_sampling=rollout.truncated_sampling,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, in all completions."""
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(frozen=True)
class StreamPiece:
    """New tokens of one completion."""

    index: int
    """Index of the completion."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of the probability of each token."""
    spans: tuple[Span, ...]
    """Weight versions of the tokens, with indices from the completion's first token. The last piece has the spans of
    the whole completion."""
    text: str | None
    """Text of the tokens, if the prompt is text."""
    finish_reason: FinishReason | None
    """None until the completion ends."""


class RolloutStream:
    """An open stream: ``async with client.generate_stream(prompt) as stream:``, then ``async for piece in stream:``.

    Leaving the block early cancels the work on the service. After the last piece, ``rollout`` equals the result of
    ``generate``.
    """

    def __init__(self, http: Http, request: GenerateRequest) -> None:
        options = StreamOptions(include_usage=True)
        self._http, self._request = http, request.model_copy(update={"stream": True, "stream_options": options})
        self._response: httpx.Response | None = None
        self._lines: AsyncIterator[str] | None = None
        self._pieces: list[list[StreamedChoice]] = [[] for _ in range(request.sampling_params.n)]
        self._prompt_token_ids = request.token_ids
        self._ready: list[StreamPiece] = []
        self._rollout: Rollout | None = None
        self._request_id, self._is_over = request.request_id or "", False

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """The prompt's token ids. None: the service has not tokenized the text yet."""
        return self._prompt_token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens read so far, in all completions."""
        return sum(len(piece.token_ids) for pieces in self._pieces for piece in pieces)

    @property
    def attempts(self) -> int:
        """Number of attempts of the rollout; 1 until the rollout ends."""
        return 1 if self._rollout is None else self._rollout.attempts

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The tokens read so far of each completion. ``finish_reason`` is "abort" for an unfinished completion."""
        most = self._request.sampling_params.max_tokens
        if most is not None:  # it counts the tokens that the request carries on, too
            most -= len(self._request.partial_token_ids)
        return tuple(_so_far(index, pieces, most) for index, pieces in enumerate(self._pieces))

    @property
    def partial(self) -> PartialRollout:
        """The tokens read so far, in a form that ``generate_batch`` can continue after the block has ended."""
        return PartialRollout(
            request_id=self._request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            completions=self.completions if self.num_tokens else (),
            attempts=self.attempts,
            truncated_sampling=self._request.sampling_params.is_truncated,
        )

    @property
    def rollout(self) -> Rollout:
        """The complete rollout. Raises RuntimeError before the last piece was read."""
        if self._rollout is None:
            raise RuntimeError("the rollout is not over: read all pieces of the stream first")
        return self._rollout

    async def open(self) -> Self:
        """Open the stream, as ``async with`` does. Raises the errors of ``generate``, after the same retries."""
        body = body_of(self._request)
        self._response = await self._http.send(
            "POST", "/inference/v1/generate", json=body, repeat=Repeat.IF_LOST, stream=True
        )
        self._lines = self._response.aiter_lines()
        return self

    async def next(self) -> StreamPiece | None:
        """Return the next piece, or None at the end.

        Raises the service's error if the rollout fails, or ``httpx.TransportError`` if the connection fails.
        ``partial`` then holds the tokens read so far.
        """
        if self._lines is None:
            raise RuntimeError("open the stream first: async with client.generate_stream(...) as stream")
        if self._is_over:
            return None
        while not self._ready:
            line = await anext(self._lines, None)
            if line is None:
                raise httpx.RemoteProtocolError("the service ended the stream before the rollout was over")
            if line == "data: [DONE]":
                self._is_over = True
                return None
            if line.startswith("data: "):
                self._take(line.removeprefix("data: "))
        return self._ready.pop(0)

    def _take(self, event: str) -> None:
        try:
            data = json.loads(event)
            if "error" in data:
                raise from_wire(200, data)
            chunk = GenerateChunk.model_validate(data, extra="ignore")  # as in parse
            if unknown := {choice.index for choice in chunk.choices} - set(range(len(self._pieces))):
                raise ValueError(f"completion {min(unknown)} came for n={len(self._pieces)}")
        except ValueError as error:
            raise RolloutServiceError(
                f"an event that this client cannot read: {error}; install the client of the service's release"
            ) from error
        self._request_id = chunk.request_id
        self._prompt_token_ids = chunk.prompt_token_ids or self._prompt_token_ids
        for choice in chunk.choices:
            self._pieces[choice.index].append(choice)
            self._ready.append(
                StreamPiece(
                    index=choice.index,
                    token_ids=choice.token_ids,
                    logprobs=_flat(choice),
                    spans=choice.weight_versions,
                    text=choice.text,
                    finish_reason=choice.finish_reason,
                )
            )
        if not chunk.choices:
            self._rollout = self._whole(chunk)

    def _whole(self, last: GenerateChunk) -> Rollout:
        try:
            if unended := [index for index, read in enumerate(self._pieces) if not read or not read[-1].finish_reason]:
                raise ValueError(f"completion {unended[0]} has no end")
            return Rollout(
                request_id=last.request_id,
                prompt_token_ids=self._prompt_token_ids or (),
                completions=tuple(_so_far(index, read, None) for index, read in enumerate(self._pieces)),
                replica_id=last.replica_id or "",
                attempts=last.attempts or 1,
                cached_tokens=cached_tokens(last.usage),
                truncated_sampling=bool(last.truncated_sampling),
            )
        except ValueError as error:
            raise RolloutServiceError(f"stream {last.request_id} contradicts itself: {error}") from error

    async def aclose(self) -> None:
        """Cancel the rollout unless it has ended, and close the connection."""
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamPiece:
        if (piece := await self.next()) is None:
            raise StopAsyncIteration
        return piece


def _flat(choice: StreamedChoice) -> tuple[float, ...]:
    if isinstance(choice.logprobs, tuple):
        return choice.logprobs
    return tuple(token.logprob for token in choice.logprobs.content)


def _so_far(index: int, pieces: list[StreamedChoice], max_tokens: int | None) -> Completion:
    """Return a completion from its pieces so far. One with ``max_tokens`` tokens has ended, even if its end is not
    reported."""
    if not pieces:
        return Completion(index=index, token_ids=(), logprobs=(), finish_reason="abort", spans=())
    last = pieces[-1]
    num_tokens = sum(len(piece.token_ids) for piece in pieces)
    so_far = merge_spans(span for piece in pieces for span in piece.weight_versions)
    texts = [piece.text for piece in pieces if piece.text is not None]
    likeliest = [row for piece in pieces for row in piece.top_logprobs or ()]
    masks = [chunk for piece in pieces for chunk in piece.packed_sampling_mask or ()]
    return Completion(
        index=index,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in _flat(piece)),
        finish_reason=last.finish_reason or ("length" if num_tokens == max_tokens else "abort"),
        stop_reason=last.stop_reason,
        spans=so_far if last.finish_reason is None else last.weight_versions,
        text="".join(texts) if texts else None,
        top_logprobs=tuple(likeliest) if likeliest else None,
        packed_sampling_mask=tuple(masks) if masks else None,
    )
