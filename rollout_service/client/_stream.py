"""A rollout read as a stream."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx
from pydantic import ValidationError

from rollout_service.client._generate import body_of
from rollout_service.client._http import Http
from rollout_service.client._partial import PartialRollout
from rollout_service.client._retry import Repeat
from rollout_service.errors import RolloutServiceError, from_wire
from rollout_service.protocol.generate import GenerateChunk, GenerateRequest, StreamedChoice, StreamOptions
from rollout_service.protocol.rollout import Completion, FinishReason, Rollout, Span, merge_spans


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
        self._response = await self._http.open_stream(
            "POST", "/inference/v1/generate", json=body, repeat=Repeat.IF_LOST
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
            chunk = GenerateChunk.model_validate(data)
        except (ValueError, ValidationError) as error:
            raise RolloutServiceError(
                f"an event that this client cannot read: {error}; install the client of the service's release"
            ) from error
        self._request_id = chunk.request_id
        self._prompt_token_ids = chunk.prompt_token_ids or self._prompt_token_ids
        for choice in chunk.choices:
            self._pieces[choice.index].append(choice)
            self._ready.append(
                StreamPiece(
                    choice.index,
                    choice.token_ids,
                    _flat(choice),
                    choice.weight_versions,
                    choice.text,
                    choice.finish_reason,
                )
            )
        if not chunk.choices:
            self._rollout = self._whole(chunk)

    def _whole(self, last: GenerateChunk) -> Rollout:
        try:
            return Rollout(
                request_id=last.request_id,
                prompt_token_ids=self._prompt_token_ids or (),
                completions=tuple(_join_pieces(pieces) for pieces in self._pieces),
                replica_id=last.replica_id or "",
                attempts=last.attempts or 1,
                truncated_sampling=bool(last.truncated_sampling),
            )
        except (ValueError, IndexError) as error:
            raise RolloutServiceError(f"stream {last.request_id} contradicts itself: {error}") from error

    async def aclose(self) -> None:
        """Cancel the rollout unless it has ended, and close the connection."""
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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


def _join_pieces(pieces: list[StreamedChoice]) -> Completion:
    """Return a completion that has ended."""
    if pieces[-1].finish_reason is None:
        raise ValueError(f"completion {pieces[-1].index} has no end")
    return _so_far(pieces[-1].index, pieces, None)


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
