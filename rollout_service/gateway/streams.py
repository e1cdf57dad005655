"""Server-sent events of running rollouts, for the routes that stream tokens."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse

from rollout_service.errors import InvalidRequest, RolloutServiceError
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
