"""Batches of prompts: groups of completions, read as streams, which a later call can continue, and their failures."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import httpx

from rollout_service.client._generate import Prompt, request_of, token_ids_of
from rollout_service.client._http import Http
from rollout_service.client._stream import PartialRollout, RolloutStream
from rollout_service.errors import (
    EngineFailed,
    InvalidRequest,
    NonFiniteLogprob,
    NotReady,
    Overloaded,
    RolloutServiceError,
    TooEarly,
)
from rollout_service.fleet.continuation import is_version_gone, merge_completions, min_version_of_rest
from rollout_service.protocol.generate import GenerateRequest
from rollout_service.protocol.rollout import Completion, Rollout
from rollout_service.protocol.sampling import LARGEST_SEED, GenerateCall, Sampling
from rollout_service.runtime.tasks import raise_first_failure

_CUT = (httpx.NetworkError, httpx.RemoteProtocolError, NotReady, Overloaded)
"""Errors that end a stream but leave its tokens usable: another request can continue them."""


_VERSIONS = ("min_weight_version", "weight_version")
"""Options that say which weight version may answer."""
_OF_ONE_PROMPT = (InvalidRequest, NonFiniteLogprob, EngineFailed)
"""Errors of a single prompt: the rest of the batch continues. Any other error ends the batch."""


class PartialBatch(NamedTuple):
    """The result of ``generate_batch(prompts, until=K)``. Both fields are keyed by the index in ``prompts``,
    ascending."""

    rollouts: dict[int, Rollout]
    """The first K complete groups: every completion has ended by itself."""
    partial: dict[int, PartialRollout]
    """The other groups. Pass them to the next call, together with new prompts."""


class BatchFailed(Exception):
    """Raised when some prompts of ``generate_batch`` failed. It holds all completions generated so far.

    The exception is also an instance of its first error's class, so that ``except ContextTooLong`` works.
    """

    rollouts: dict[int, Rollout]
    """The complete rollouts, by index in ``prompts``."""
    partial: dict[int, PartialRollout]
    """With ``until``: the groups that can be continued, as in ``PartialBatch``."""
    errors: dict[int, Exception]
    """The error of each failed prompt. A prompt in none of the three fields was cancelled or never started."""
    num_prompts: int

    @classmethod
    def of(
        cls,
        rollouts: Mapping[int, Rollout],
        partial: Mapping[int, PartialRollout],
        errors: Mapping[int, Exception],
        num_prompts: int,
    ) -> BatchFailed:
        """Create the exception; ``errors`` holds at least one error, in order of occurrence."""
        first = next(iter(errors.values()))
        of_both: type[BatchFailed] = type(cls.__name__, (cls, type(first)), {"__module__": cls.__module__})
        made = of_both.__new__(of_both)
        vars(made).update(vars(first))  # attributes of the first error's class, such as ``detail``
        made.rollouts, made.partial, made.errors = dict(rollouts), dict(partial), dict(errors)
        made.num_prompts = num_prompts
        return made

    def __str__(self) -> str:
        index, first = next(iter(self.errors.items()))
        others = sorted(self.errors.keys() - {index})
        also = f"; {len(others)} more prompts failed, see .errors" if others else ""
        return (
            f"prompt {index} of {self.num_prompts}, counted from 0: {first}{also}; the {len(self.rollouts)} rollouts "
            "that are complete are in .rollouts"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return BatchFailed.of, (self.rollouts, self.partial, self.errors, self.num_prompts)


class Failures:
    """The errors of a batch's prompts, by prompt index, in the order of their occurrence."""

    def __init__(self) -> None:
        self.errors: dict[int, Exception] = {}

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Record an error of the prompt ``index``. Raises the error again unless it concerns this prompt only."""
        try:
            yield
        except (RolloutServiceError, httpx.TransportError) as error:
            self.errors[index] = error
            if not isinstance(error, _OF_ONE_PROMPT):
                raise

    @contextmanager
    def suppress_recorded(self) -> Iterator[None]:
        """Suppress the error that ended the batch if ``of`` has recorded it."""
        try:
            yield
        except (RolloutServiceError, httpx.TransportError) as error:
            if error not in self.errors.values():
                raise

    def batch_failed(
        self, rollouts: Mapping[int, Rollout], partial: Mapping[int, PartialRollout], num_prompts: int
    ) -> BatchFailed:
        """Return the exception for these errors, caused by the first."""
        failed = BatchFailed.of(rollouts, partial, self.errors, num_prompts)
        failed.__cause__ = next(iter(self.errors.values()))
        return failed


class _StreamCut(Exception):
    """Raised when an open stream breaks; ``by`` is the cause."""

    def __init__(self, by: Exception) -> None:
        super().__init__(str(by))
        self.by = by


class Group:
    """The completions of one prompt, including those still being generated."""

    def __init__(
        self, http: Http, prompt: Prompt | PartialRollout, sampling: Sampling, about: dict[str, object]
    ) -> None:
        """Prepare a group from a prompt or from a partial rollout.

        Raises InvalidRequest for options that cannot be continued, or that the service would refuse.

        Args:
            about: options of the request other than sampling parameters.
        """
        self._http, self._sampling, self._about = http, sampling, about
        options = request_of((0,), sampling, **about)
        self._min_version, self._exact_version = options.min_version, options.exact_version
        if not isinstance(prompt, PartialRollout):
            text = prompt if isinstance(prompt, str) else None
            token_ids = None if isinstance(prompt, str) else tuple(token_ids_of(prompt))
            prompt = PartialRollout(request_id=uuid.uuid4().hex, prompt=text, prompt_token_ids=token_ids)
        self._before = prompt
        self._prompt_token_ids = prompt.prompt_token_ids
        self._completions = list(prompt.completions)
        """The completions so far, without the tokens that ``_streams`` have read."""
        self._streams: dict[int | None, RolloutStream] = {}
        """The open streams, by completion index. The key None is the stream of all completions."""
        self._attempts, self._replica_id = prompt.attempts, ""
        self._truncated, self._cached_tokens = prompt.truncated_sampling, 0
        self._require_continuable()

    def _require_continuable(self) -> None:
        """Raise InvalidRequest before any request is sent. A late refusal would waste the work of the other prompts."""
        if self._about.get("return_routed_experts") or self._sampling.routed_experts_prompt_start is not None:
            raise InvalidRequest(
                "routed experts are known when a completion has ended, and are not carried on with its tokens: leave "
                "out return_routed_experts and routed_experts_prompt_start, or until and partial rollouts"
            )
        most = self._sampling.max_tokens
        for completion in self._completions:
            exact, spans = self._exact_version, completion.spans
            if completion.finish_reason == "abort" and isinstance(exact, int) and spans and spans[-1].version != exact:
                raise InvalidRequest(
                    f"completion {completion.index} of {self._before.request_id} has tokens of version "
                    f"{spans[-1].version}, and exact_version={exact} would continue it: leave out one of them"
                )
            if completion.finish_reason == "abort" and most is not None and len(completion.token_ids) >= most:
                raise InvalidRequest(
                    f"completion {completion.index} of {self._before.request_id} has {len(completion.token_ids)} "
                    f"tokens already, and max_tokens={most} counts them, too: raise it"
                )

    @property
    def is_complete(self) -> bool:
        """True if every completion has ended by itself."""
        return bool(self._completions) and all(each.finish_reason != "abort" for each in self._completions)

    async def run(self, slots: asyncio.Semaphore) -> None:
        """Generate until the completions end, or until the service stops continuing them.

        Resumes after a broken connection from the tokens read so far. Raises the errors of ``generate``.

        Args:
            slots: limits the number of concurrent requests.
        """
        for breaks in itertools.count():
            try:
                async with raise_first_failure() as group:
                    for index in self._unfinished_indices():
                        group.create_task(self._read(index, slots))
                return
            except _StreamCut as cut:
                if breaks == self._http.retries:
                    raise cut.by from None
            finally:
                self._settle()

    def _unfinished_indices(self) -> list[int | None]:
        """Return the indices of unfinished completions. ``[None]`` means that no completion exists yet: request all at
        once."""
        if not self._completions:
            return [None]
        return [completion.index for completion in self._completions if completion.finish_reason == "abort"]

    async def _read(self, index: int | None, slots: asyncio.Semaphore) -> None:
        async with slots:
            if index is None:
                await self._read_stream(None, self._whole_request())
                return
            request = self._rest_request(self._completions[index])
            asked = self._min_version
            try:
                await self._read_stream(index, request)
            except TooEarly as refusal:
                wanted = request.min_weight_version
                if wanted == asked or isinstance(wanted, str) or not is_version_gone(refusal, wanted):
                    raise
                await self._read_stream(index, request.model_copy(update={"min_weight_version": asked}))

    async def _read_stream(self, index: int | None, request: GenerateRequest) -> None:
        stream = self._streams[index] = RolloutStream(self._http, request)
        async with stream:
            try:
                async for _ in stream:
                    pass
            except _CUT as error:
                raise _StreamCut(error) from error
        self._replica_id = stream.rollout.replica_id
        if index is None:
            self._cached_tokens = stream.rollout.cached_tokens

    def _whole_request(self) -> GenerateRequest:
        before = self._before
        prompt: Prompt = before.prompt if before.prompt is not None else before.prompt_token_ids or ()
        return request_of(prompt, self._sampling, request_id=before.request_id, **self._about)

    def _rest_request(self, partial: Completion) -> GenerateRequest:
        sampling, done = self._sampling, len(partial.token_ids)
        changes: dict[str, object] = {"n": 1}
        if sampling.seed is not None:
            seed = sampling.seed + partial.index
            changes["seed"] = seed if seed <= LARGEST_SEED else seed % LARGEST_SEED
        about = {name: value for name, value in self._about.items() if name not in _VERSIONS}
        if self._exact_version is not None:
            # a label may mean another version by now
            exact = partial.spans[-1].version if partial.spans else self._exact_version
            about["weight_version"] = {"exact_version": exact}
        elif isinstance(self._min_version, str):  # only the ingest knows the label's version
            about["min_weight_version"] = self._min_version
        else:
            about["min_weight_version"] = min_version_of_rest(self._min_version, partial)
        return request_of(
            self._prompt_token_ids or (),
            sampling.model_copy(update=changes),
            partial_token_ids=partial.token_ids,
            request_id=f"{self._before.request_id[:200]}-{partial.index}-{done}",
            output_mode="tokens" if self._before.prompt is None else "text",
            **about,
        )

    def _settle(self) -> None:
        """Move the tokens that the streams have read into the group."""
        for index, stream in self._streams.items():
            if not stream.num_tokens:
                continue
            self._prompt_token_ids = self._prompt_token_ids or stream.prompt_token_ids
            self._truncated = self._truncated or self._sampling.is_truncated
            if index is None:
                self._completions = list(stream.completions)
            else:
                self._completions[index] = self._join(self._completions[index], stream.completions[0])
        self._attempts += max((stream.attempts for stream in self._streams.values() if stream.num_tokens), default=0)
        self._streams.clear()

    def _join(self, partial: Completion, rest: Completion) -> Completion:
        prompt = self._prompt_token_ids or ()
        call = GenerateCall(request_id=self._before.request_id, prompt_token_ids=prompt, sampling=self._sampling)
        # the rest already contains the text of the partial completion
        return merge_completions(call, partial, rest).model_copy(update={"text": rest.text})

    def rollout(self) -> Rollout:
        """Return the rollout in the form of ``generate``. Call it after ``run`` has returned."""
        return Rollout(
            request_id=self._before.request_id,
            prompt_token_ids=self._prompt_token_ids or (),
            completions=tuple(self._completions),
            replica_id=self._replica_id or _last_replica(self._completions),
            attempts=max(1, self._attempts),
            cached_tokens=self._cached_tokens,
            truncated_sampling=self._truncated,
        )

    def partial(self) -> PartialRollout:
        """Return the group as a partial rollout. Do not call it while ``run`` is active."""
        return self._before.model_copy(
            update={
                "prompt_token_ids": self._prompt_token_ids,
                "completions": tuple(self._completions),
                "attempts": self._attempts,
                "truncated_sampling": self._truncated,
            }
        )


def _last_replica(completions: Sequence[Completion]) -> str:
    """Return the replica that generated the last tokens of the last completion with tokens, or "" if none has any."""
    return next((each.spans[-1].replica_id or "" for each in reversed(completions) if each.spans), "")


async def first_groups(
    groups: Sequence[Group], until: int, max_requests: int, progress: Callable[[int, int], None] | None
) -> PartialBatch:
    """Return the first ``until`` groups to complete. The other groups are cancelled at that moment."""
    slots = asyncio.Semaphore(max_requests)
    done: dict[int, Rollout] = {}
    tasks: list[asyncio.Task[None]] = []
    failures = Failures()

    def note(index: int) -> None:
        if len(done) == until or not groups[index].is_complete:
            return
        done[index] = groups[index].rollout()
        if progress is not None:
            progress(len(done), until)
        if len(done) == until:
            for task in tasks:
                task.cancel()

    async def work(index: int) -> None:
        with failures.of(index):
            await groups[index].run(slots)
            note(index)

    for index in range(len(groups)):  # groups that were complete from the start
        note(index)
    if len(done) < until:
        with failures.suppress_recorded():
            async with raise_first_failure() as group:
                tasks += [group.create_task(work(index)) for index in range(len(groups)) if index not in done]
    done = dict(sorted(done.items()))
    partial = {
        index: group.partial()
        for index, group in enumerate(groups)
        if index not in done and not isinstance(failures.errors.get(index), InvalidRequest)
    }
    if failures.errors:
        raise failures.batch_failed(done, partial, len(groups))
    return PartialBatch(done, partial)
