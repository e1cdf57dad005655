"""Completions as their tokens arrive: pieces, their text, and server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from rollout_service.errors import InvalidRequest, RolloutServiceError
from rollout_service.fleet.detokenizer import Detokenizer, TokenStrings, decoder_of
from rollout_service.fleet.progress import CompletionDelta, RolloutProgress
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.prompts import of_prompt, roll_out
from rollout_service.protocol.generate import RolloutOptions
from rollout_service.protocol.rollout import Completion, Rollout, Span, merge_spans
from rollout_service.protocol.sampling import Reasoning, Sampling
from rollout_service.runtime.tasks import raise_first_failure

EVENT_STREAM: dict[str, Any] = {"content": {"text/event-stream": {}}}
"""OpenAPI entry of a streaming reply. OpenAPI 3.1 has no schema for events; their classes describe them."""


class Spans:
    """Collects the spans of one completion from its pieces."""

    def __init__(self) -> None:
        self._gathered: list[Span] = []

    def of(self, piece: CompletionDelta) -> Completion:
        """Return the piece with spans whose indices count from the completion's first token. The last piece has all
        spans."""
        own = [span.shift(piece.start) for span in piece.made.spans]
        self._gathered[-1:] = merge_spans([*self._gathered[-1:], *own])
        return piece.made.model_copy(update={"spans": tuple(self._gathered if piece.is_last else own)})


async def live_pieces(
    prompt: tuple[int, ...],
    sampling: Sampling,
    services: Services,
    options: RolloutOptions,
    reasoning: Reasoning | None = None,
    partial: tuple[int, ...] = (),
) -> AsyncGenerator[CompletionDelta | Rollout]:
    """Yield the pieces of ``roll_out`` as they arrive, and then the rollout. Closing the generator cancels the work."""
    if services.returns_experts and sampling.routed_experts_prompt_start is not None:
        raise InvalidRequest(
            f"routed_experts_prompt_start={sampling.routed_experts_prompt_start}: routed experts are known when a "
            "completion has ended, not in a stream: leave out one of them"
        )
    progress = RolloutProgress(sampling.n)
    making = asyncio.create_task(roll_out(prompt, sampling, services, options, reasoning, progress, partial))
    async with aclosing(progress.stream(making)) as deltas:
        async for delta in deltas:
            yield delta
    yield making.result()


async def side_by_side(
    streams: Sequence[AsyncGenerator[CompletionDelta | Rollout]],
) -> AsyncGenerator[tuple[int, CompletionDelta | Rollout]]:
    """Yield the items of several streams with the index of each stream. Reads an item only after the previous one was
    taken."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for one in only:
                yield 0, one
        return
    taken: asyncio.Queue[tuple[int, CompletionDelta | Rollout] | None] = asyncio.Queue(maxsize=1)

    async def read(number: int, stream: AsyncGenerator[CompletionDelta | Rollout]) -> None:
        async with aclosing(stream):
            try:
                async for item in stream:
                    await taken.put((number, item))
            except RolloutServiceError as error:
                raise of_prompt(error, [number], len(streams)) from error

    async def read_all() -> None:
        try:
            async with raise_first_failure() as group:
                for number, stream in enumerate(streams):
                    group.create_task(read(number, stream))
        except Exception:  # not for GeneratorExit or CancelledError, when nothing takes items any more
            await taken.put(None)
            raise
        await taken.put(None)

    reading = asyncio.create_task(read_all())
    try:
        while (item := await taken.get()) is not None:
            yield item
        await reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def event_stream(chunks: AsyncGenerator[dict[str, object]]) -> StreamingResponse:
    """Return the streaming reply after the first chunk has arrived, so that an earlier error becomes an HTTP error.

    A later error is sent as the last event, in the service's error format.
    """
    first = await anext(chunks)

    async def lines() -> AsyncIterator[str]:
        async with aclosing(chunks):
            try:
                yield _event(first)
                async for chunk in chunks:
                    yield _event(chunk)
            except RolloutServiceError as error:
                yield _event(error.to_wire())
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _event(chunk: object) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


class TextStream:
    """The text of one completion, piece by piece, as in vLLM: the text that its tokens add to the prompt's text.

    The text ends before the stop string or stop token, or after it if the request keeps it. Like vLLM, it searches only
    for stop strings that end in the newest token.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokenizer: Any, partial: Sequence[int] = ()) -> None:
        """Create the stream; without a tokenizer, the text is empty. The first piece includes the text of ``partial``,
        the tokens before it."""
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(decoder_of(tokenizer), prompt, sampling.skip_special_tokens)
        self._keeps_stop = sampling.include_stop_str_in_output
        self._longest_stop = max(map(len, sampling.stop), default=1)
        self._tail = "" if self._detokenizer is None else self._detokenizer.add(partial)
        """The end of the text, in which a stop string may begin."""
        self._returned = 0
        """Number of characters of the tail that were returned."""
        self._before_last = len(self._tail)
        """Number of characters of the tail before the newest token."""

    def add(self, made: Completion, is_last: bool) -> str:
        """Return the new text of the next tokens. Holds back characters that may begin a stop string.

        ``made``: the completion with only these tokens.
        """
        if self._detokenizer is None:
            return ""
        tokens, stop = made.token_ids, made.stop_reason
        is_stopped = is_last and made.finish_reason == "stop"
        if is_stopped and not isinstance(stop, str) and not self._keeps_stop:
            tokens = tokens[:-1]
        if tokens:
            self._tail += self._detokenizer.add(tokens[:-1])
            self._before_last = len(self._tail)
            self._tail += self._detokenizer.add(tokens[-1:])
        end = len(self._tail)
        if is_stopped and isinstance(stop, str):
            found = self._tail.find(stop, max(0, self._before_last - len(stop) + 1))
            if found >= 0:
                end = found + len(stop) * self._keeps_stop
        elif not is_last and not self._keeps_stop:
            end -= self._longest_stop - 1
        text = self._tail[self._returned : max(0, end)]
        self._returned += len(text)
        done = max(0, min(self._returned, self._before_last - self._longest_stop))
        self._tail = self._tail[done:]
        self._returned -= done
        self._before_last -= done
        return text


def text_of(completion: Completion, sampling: Sampling, services: Services, prompt: Sequence[int] = ()) -> str | None:
    """Return the text that a whole completion adds to ``prompt``, or None if the model has no tokenizer."""
    if services.tokenizer is None:
        return None
    return TextStream(prompt, sampling, services.tokenizer).add(completion, is_last=True)


def token_strings(prompt: Sequence[int], tokenizer: Any) -> TokenStrings:
    """Return the strings of the tokens that follow ``prompt``."""
    return TokenStrings(decoder_of(tokenizer), prompt)
