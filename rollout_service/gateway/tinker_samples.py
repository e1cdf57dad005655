"""Samples of Tinker's SDK, which starts a sample and polls for its result."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from pydantic import ValidationError

from rollout_service.errors import RolloutServiceError, SampleGone, TooManySamples
from rollout_service.web.errors import validation_error

MAX_SAMPLES = 4096
"""Maximum number of samples that are kept. The SDK sends at most 2000 at once."""
KEPT_S = 120.0
"""Time in seconds for which a result is kept, so that a lost reply can be fetched again, and for which a sample runs
without a poll."""
MAX_BYTES = 1 << 30
"""Maximum size of all results that are kept. One with prompt logprobs can have 32 MB."""
_EXPIRE_EVERY_S = 1.0
_LONGEST_ID = 512
"""Maximum number of characters of an unknown id that an error repeats."""
POLL_S = 20.0
"""Maximum time in seconds that a poll waits. The SDK gives up after 45 s, and polls again."""


@dataclass
class _Sample:
    task: "asyncio.Task[bytes | dict[str, str]]"
    polled_at: float
    ended_at: float | None = None


@dataclass
class Samples:
    """The samples of one gateway."""

    clock: Callable[[], float] = time.monotonic
    _samples: dict[str, _Sample] = field(default_factory=dict)
    _results: dict[str, int] = field(default_factory=dict)
    """The sizes of the results, oldest first."""
    _nbytes: int = 0
    _timer: asyncio.TimerHandle | None = None
    """Runs while samples are kept."""

    def start(self, request_id: str, make: Callable[[], Coroutine[object, None, bytes]]) -> None:
        """Start a sample, unless it is known. Raises TooManySamples."""
        if request_id in self._samples:
            return
        self._expire()
        self._make_room(1)
        if len(self._samples) >= MAX_SAMPLES:
            raise TooManySamples(f"{MAX_SAMPLES} samples are open: send it again", {"limit": MAX_SAMPLES})
        sample = self._samples[request_id] = _Sample(asyncio.create_task(_result(make())), self.clock())

        def end(task: "asyncio.Task[bytes | dict[str, str]]") -> None:
            sample.ended_at = self.clock()
            if self._samples.get(request_id) is sample:
                failed = task.cancelled() or task.exception() is not None
                self._results[request_id] = nbytes = 0 if failed else len(task.result())
                self._nbytes += nbytes
                self._make_room(0)

        sample.task.add_done_callback(end)
        if self._timer is None:
            self._expire_later()

    async def result(self, request_id: str) -> bytes | dict[str, str] | None:
        """Return the message or the error of a sample; None: it is under way. Raises SampleGone."""
        sample = self._samples.get(request_id)
        if sample is None:
            known = f"sample {request_id[:_LONGEST_ID]} is not known"
            raise SampleGone(f"{known}: it was fetched long ago, or another gateway has it")
        sample.polled_at = self.clock()
        await asyncio.wait([sample.task], timeout=POLL_S)
        return sample.task.result() if sample.task.done() and not sample.task.cancelled() else None

    def cancel(self, request_id: str) -> None:
        """Stop a sample that nobody waits for any more, or forget its result."""
        if (sample := self._samples.pop(request_id, None)) is not None:
            self._nbytes -= self._results.pop(request_id, 0)
            sample.task.cancel()

    def _make_room(self, more: int) -> None:
        """Forget the oldest results if there are too many bytes, or too many samples for ``more`` others."""
        while self._results and (len(self._samples) + more > MAX_SAMPLES or self._nbytes > MAX_BYTES):
            self.cancel(next(iter(self._results)))  # a poll that has begun still gets the result

    def _expire(self) -> None:
        """Forget results that nobody will fetch again. Cancel samples whose client no longer polls: they would keep
        their places in the queue."""
        now = self.clock()
        for name, each in list(self._samples.items()):
            if now - (each.polled_at if each.ended_at is None else each.ended_at) > KEPT_S:
                self.cancel(name)

    def _expire_later(self) -> None:
        self._expire()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_EXPIRE_EVERY_S, self._expire_later) if self._samples else None


async def _result(made: Coroutine[object, None, bytes]) -> bytes | dict[str, str]:
    """Return the message, or the error as the SDK reads it."""
    try:
        return await made
    except ValidationError as error:
        problem: RolloutServiceError = validation_error("asample", error.errors(include_url=False))
    except RolloutServiceError as error:
        problem = error
    return {"error": problem.message, "category": "user" if problem.http_status < 500 else "server"}
