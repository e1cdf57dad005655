"""Dispatch of a rollout to one or several replicas, with retries.

A call waits in the gateway's queue (``fleet/queue.py``) until a replica has room. A *refusal* (full, older version than
requested, being replaced) has no cost: other replicas are asked, then the call waits in the queue again. An *attempt*
is a generation that began. If it is aborted, it continues from its tokens on another replica. If its replica is lost,
it continues from the tokens that the replica had reported (``fleet/progress.py``). Attempts are bounded.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from rollout_service.config.engine import EngineConfig
from rollout_service.errors import (
    DeploymentFailed,
    EngineFailed,
    KVCacheFull,
    NotReady,
    Overloaded,
    RolloutServiceError,
    TooEarly,
)
from rollout_service.fleet.continuation import (
    StopSearch,
    continuation_call,
    cut_at_stop,
    fill_from_others,
    is_version_gone,
    merge_completions,
    why_restart,
    with_replica_id,
    without_tokens,
)
from rollout_service.fleet.detokenizer import Decode
from rollout_service.fleet.progress import CallProgress, ProgressPoller, RolloutProgress
from rollout_service.fleet.queue import DispatchQueue
from rollout_service.metrics import table
from rollout_service.metrics.process import outcome_of, record
from rollout_service.protocol.rollout import Completion, OnAbort, Rollout
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime.placements import RoutedFleet
from rollout_service.runtime.rpc import EngineCalls, IngestCalls
from rollout_service.runtime.tasks import raise_first_failure

logger = logging.getLogger(__name__)

_REFUSALS = (Overloaded, TooEarly, NotReady)
_UNPLACED_S = 5.0
"""Time in seconds after which a call that no replica has taken is sent again, twice as long each time: Serve refuses it
once it has given up the engines."""
_FLEET_ANSWERS_S = 5.0
_SHOW_QUEUE_S = 5.0
_MAX_FAILED_STARTS = 3
"""Number of consecutive failed starts after which, without a replica, calls fail with the reason instead of waiting."""
_BYTES_PER_TOKEN = 40
"""Size of a prompt token in the gateway: a pointer and a Python int."""
_BYTES_PER_ROW = 64
"""Size in bytes of the tuple of a position's target tokens, without them."""
_BYTES_PER_CALL = 16 << 10
"""Size in bytes of a call without its prompt: its HTTP request, task and parameters."""


class Dispatcher:
    """Sends calls to the engine deployment."""

    def __init__(
        self,
        engine: EngineCalls,
        ingest: IngestCalls,
        limits: EngineConfig,
        decode: Decode | None = None,
        fleet: RoutedFleet | None = None,
        share: int = 1,
        groups: Sequence["Dispatcher"] = (),
    ) -> None:
        """
        Args:
            engine, ingest: The deployments.
            limits: Configuration of the engines.
            decode: The model's tokenizer. None: it has none, and no call has stop strings.
            fleet: The replicas that the router knows. None: one replica is assumed.
            share: ``ServiceConfig.sequences_per_gateway``.
            groups: The dispatchers of the groups in ``scaling.groups``.
        """
        self._engine, self._ingest, self._limits, self._decode = engine, ingest, limits, decode
        self._origin = uuid.uuid4().hex
        self._fleet, self._share, self._is_listening = fleet, share, False
        self._groups = groups
        self.queue = DispatchQueue(self._room)
        """The waiting calls."""
        self._poller = ProgressPoller(engine, self._origin, queued=lambda: self.queue.sequences)

    def why_restart(self, sampling: Sampling) -> str | None:
        """Return the reason why a completion cannot continue from its tokens; None: it can."""
        return why_restart(sampling, self._limits)

    async def complete(
        self, call: GenerateCall, on_abort: OnAbort = "continue", rollout: RolloutProgress | None = None
    ) -> Rollout:
        """Return the ``n`` completions of one prompt. Cancelling this also cancels them on the replicas.

        With ``on_abort="return"``, after the last attempt, or after a pause that returns aborted completions, an
        aborted completion is returned with its tokens and ``finish_reason="abort"``. The same holds for a completion
        whose replica was lost, or whose continuation is refused or fails. ``rollout``: for a streaming client.

        Raises Overloaded if the queue is full, TooEarly, NotReady, InvalidRequest, NonFiniteLogprob, or EngineFailed if
        no completion has a token.
        """
        for pinned in self._groups:
            if call.exact_weight_version is not None and pinned.serves(call.exact_weight_version):
                return await pinned.complete(call, on_abort, rollout)
        self._listen()
        call = call.model_copy(update={"origin": self._origin, "live": rollout is not None})
        rollout = rollout or RolloutProgress(call.sampling.n)
        rollout.is_streamed = call.live and why_restart(call.sampling, self._limits) is None
        progress = CallProgress(call, self.queue.ticket(call.priority, call.session_id), rollout, rollout.completions)
        made = await self._run_attempts(call, progress)
        stopped = [self._end_at_stop_string(call, completion, 0) for completion in made.completions]
        returns = on_abort == "return" or made.returned
        refuted = [_is_refuted(*each) for each in zip(made.completions, stopped, strict=True)]
        if (returns and not any(refuted)) or all(c.finish_reason != "abort" for c in stopped):
            return made.model_copy(update={"completions": tuple(stopped), "attempts": progress.attempts})
        async with raise_first_failure() as group:
            rests = [
                group.create_task(self._continue(completion, is_refuted, made.replica_id, progress, returns))
                for completion, is_refuted in zip(stopped, refuted, strict=True)
            ]
        completions, replicas, attempts, failures = zip(*(rest.result() for rest in rests), strict=True)
        if not any(completion.token_ids for completion in completions):
            for failure in filter(None, failures):
                raise failure
        last = max(range(len(rests)), key=lambda i: attempts[i])
        completions = fill_from_others(call, completions)
        return made.model_copy(
            update={"completions": completions, "replica_id": replicas[last], "attempts": attempts[last]}
        )

    def serves(self, version: int) -> bool:
        """Return True if a replica serves exactly this weight version, as the router knows it."""
        return self._fleet is not None and any(each.version == version for each in self._fleet.replicas.values())

    async def _continue(
        self, completion: Completion, is_refuted: bool, replica_id: str, first: CallProgress, returns: bool
    ) -> tuple[Completion, str, int, RolloutServiceError | None]:
        """Continue ``completion`` until it ends by itself, attempts are used up, or its continuation fails.

        ``is_refuted``: vLLM matched a stop string that begins in the prompt, so the stop is wrong. ``returns``: the
        caller continues aborted completions itself. Return the completion, the replica that sampled its last token,
        the number of attempts, and the continuation's error.
        """
        call, failure, number = first.asked, None, first.attempts
        progress = replace(first, completions=(first.completions[completion.index],))
        restarts = why_restart(call.sampling, self._limits) is not None
        while completion.finish_reason == "abort":
            number += 1
            if restarts or not is_refuted:  # a refuted stop is not an interruption, and so not another attempt
                if returns or progress.attempts >= self._limits.max_attempts:
                    break
                progress.attempts += 1
                record(table.CONTINUATIONS, cause=progress.cut_short_by)
            progress.base = base = without_tokens(completion) if restarts else completion
            progress.cut_short_by = "abort"
            try:
                made = await self._generate_rest(call, base, number, progress)
            except RolloutServiceError as error:
                # the caller gets every token there is, of this completion and of the prompt's others
                logger.warning("completion %d of %s stays unfinished: %s", base.index, call.request_id, error)
                failure = error
                break
            whole, replica_id = merge_completions(call, base, made.completions[0]), made.replica_id
            completion = self._end_at_stop_string(call, whole, len(base.token_ids))
            is_refuted = _is_refuted(whole, completion)
            returns = returns or made.returned
        return completion, replica_id, progress.attempts, failure

    async def _generate_rest(
        self, call: GenerateCall, base: Completion, number: int, progress: CallProgress
    ) -> Rollout:
        """Generate what ``base`` lacks, with weights at least as new as those of its last token.

        ``number``: number of the generation, for the request's id.
        """
        request = continuation_call(call, base, number)
        try:
            return await self._run_attempts(request, progress)
        except TooEarly as refusal:
            wanted = request.min_weight_version
            if wanted == call.min_weight_version or not is_version_gone(refusal, wanted):
                raise
        request = request.model_copy(update={"min_weight_version": call.min_weight_version})
        return await self._run_attempts(request, progress)

    def _search(self, call: GenerateCall, base: tuple[int, ...]) -> StopSearch | None:
        """Return a search for stop strings after ``base``; None if the engine finds each of them, and no other."""
        if not call.sampling.stop or self._decode is None:
            return None
        search = StopSearch(call, base, self._decode)
        return search if call.partial_tokens or base or search.doubts_engine else None

    def _end_at_stop_string(self, call: GenerateCall, completion: Completion, seam: int) -> Completion:
        """Return the completion up to the first stop string. Its tokens from ``seam`` on are of one generation.

        If its engine stopped at a stop string of its prompt, it gets "abort", and must be continued.
        """
        is_stopped = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        if not (call.partial_tokens or seam or is_stopped):
            return completion
        search = self._search(call, completion.token_ids[:seam])
        if search is None:
            return completion
        if (found := search.end_in(completion.token_ids[seam:])) is not None:
            return cut_at_stop(call, completion, seam + found[0], found[1])
        if not search.refutes(completion, seam):
            return completion
        is_longest = len(completion.token_ids) == call.sampling.max_tokens
        return completion.model_copy(update={"finish_reason": "length" if is_longest else "abort", "stop_reason": None})

    async def _run_attempts(self, call: GenerateCall, progress: CallProgress) -> Rollout:
        """Return one generation, retrying if its replica is lost before it reported a token, or with the prompt's
        logprobs.

        Raises EngineFailed when attempts are used up.
        """
        while True:
            try:
                return await self._send_until_accepted(call, progress)
            except EngineFailed as lost:  # the replica died with the call, or its engine did
                if progress.attempts >= self._limits.max_attempts:
                    raise EngineFailed(
                        f"{call.request_id} lost its replica in attempt {progress.attempts} of "
                        f"{self._limits.max_attempts}: send it again ({lost})",
                        {"attempts": progress.attempts},
                    ) from lost
                progress.attempts += 1
                record(table.CONTINUATIONS, cause="lost")

    async def _send_until_accepted(self, call: GenerateCall, progress: CallProgress) -> Rollout:
        """Send the call until a replica accepts it. If that replica is lost, return the tokens it had reported.

        Waits in the queue while replicas are full or being replaced; the rest of a completion for at most
        ``replica_wait_s``. Waits up to ``version_wait_s`` for the weight version that it asks for, but not for an exact
        one that every replica has passed. Raises EngineFailed if the lost replica's tokens cannot be used.
        """
        time = asyncio.get_running_loop().time
        rounds, refusals, lacks_memory = 0, list[RolloutServiceError](), False
        rest_until = time() + self._limits.replica_wait_s if progress.base is not None else math.inf
        version_until = math.inf
        while True:
            until = rest_until if version_until == math.inf else version_until
            try:
                async with asyncio.timeout_at(None if until == math.inf else until) as waiting:
                    async with self.queue.turn(
                        progress.ticket, call.sampling.n, _size(call), rounds, lacks_memory=lacks_memory
                    ) as turn:
                        waiting.reschedule(None)
                        answer = await self._ask_replicas(call, progress)
                        if isinstance(answer, Rollout):
                            return answer
                        turn.was_refused = True
                        lacks_memory = any(isinstance(refusal, KVCacheFull) for refusal in answer)
                        turn.is_full = not lacks_memory and all(isinstance(each, Overloaded) for each in answer)
            except TimeoutError:
                if version_until != math.inf:
                    raise await self._too_early(call, refusals) from None
                raise self._not_placed(call, refusals) from None
            rounds, refusals = rounds + 1, answer
            if all(_has_passed(refusal, call) for refusal in refusals):
                raise await self._too_early(call, refusals)
            if not all(isinstance(refusal, TooEarly) for refusal in refusals):
                version_until = math.inf
            elif version_until == math.inf:
                version_until = time() + self._limits.version_wait_s

    async def _ask_replicas(self, call: GenerateCall, progress: CallProgress) -> Rollout | list[RolloutServiceError]:
        """Send the call to one replica after the other. Return the refusals if all have refused.

        Raises NotReady if Serve has given up the engines, or could not send the call several times.
        """
        refused, refusals = set(progress.lost_on), list[RolloutServiceError]()
        while True:
            try:
                return await self._send(call.model_copy(update={"avoid": tuple(sorted(refused))}), progress)
            except DeploymentFailed:
                raise
            except _REFUSALS as refusal:
                record(table.REFUSALS, reason=outcome_of(refusal))
                refusals.append(refusal)
                replica_id = refusal.detail.get("replica_id")
                if not isinstance(replica_id, str):
                    progress.not_sent += 1
                    if "is_given_up" in refusal.detail or progress.not_sent >= self._limits.max_attempts:
                        raise
                    return refusals
                progress.not_sent = 0
                if replica_id in refused:
                    return refusals
                refused.add(replica_id)

    async def _send(self, call: GenerateCall, progress: CallProgress) -> Rollout:
        """Return one replica's reply, or the tokens it had reported before it was lost.

        Raises EngineFailed if it had reported none, or if no continuation will compute the prompt's logprobs.
        """
        base = progress.base
        for completion in progress.completions:
            # the whole completion is searched again at its end, so only a stream needs the search meanwhile
            is_searched = progress.rollout.is_streamed
            tokens = () if base is None else base.token_ids
            completion.begin(base, self._search(progress.asked, tokens) if is_searched else None)
        with self._poller.follow(progress):
            try:
                call = call.model_copy(update={"number": progress.number})
                return with_replica_id(await self._generate(call, progress))
            except DeploymentFailed:
                raise
            except (EngineFailed, NotReady) as lost:
                if progress.is_empty and isinstance(lost, NotReady):
                    raise  # a refusal; a call with tokens was lost instead, for example with its node
                replica_id = lost.detail.get("replica_id", progress.replica_id)
                progress.lose(replica_id)
                if progress.is_empty:
                    raise
                told = tuple(_end_if_longest(each, call) for each in progress.reported())
                if _asks_of_prompt(call) and all(each.finish_reason != "abort" for each in told):
                    raise EngineFailed(f"the prompt's logprobs of {call.request_id} are lost: {lost}") from lost
                return Rollout(
                    request_id=call.request_id,
                    prompt_token_ids=call.prompt_token_ids,
                    completions=told,
                    replica_id=progress.replica_id or str(replica_id),
                )

    async def _generate(self, call: GenerateCall, progress: CallProgress) -> Rollout:
        """Have a replica generate. While there is none, check periodically that one can start.

        Raises NotReady if Serve has given up the engines or the ingest, or if starts keep failing.
        """
        checks = 1
        while self._fleet is not None and not self._fleet.replicas:
            generating = asyncio.ensure_future(self._engine.generate(call))
            try:
                for _ in range(checks):
                    await asyncio.wait([generating], timeout=_UNPLACED_S)
                    if generating.done() or progress.replica_id is not None or self._fleet.replicas:
                        return await generating
                    await self._require_startable()
            finally:
                generating.cancel()
            checks *= 2  # Serve keeps a cancelled call until it has a replica for it
        return await self._engine.generate(call)

    async def _require_startable(self) -> None:
        try:
            async with asyncio.timeout(_FLEET_ANSWERS_S):
                fleet = await self._ingest.fleet()
        except (NotReady, TimeoutError) as error:
            if isinstance(error, NotReady) and "is_given_up" in error.detail:
                raise
            return  # the ingest is being replaced
        failed = fleet.failed_starts
        is_served = any(replica.version is not None and replica.error is None for replica in fleet.unpinned)
        if failed is not None and not failed.over and failed.tries >= _MAX_FAILED_STARTS and not is_served:
            raise NotReady(
                f"no engine replica is live, and {failed.tries} starts have failed, the first "
                f"({failed.first.replica_id}) with: {failed.first.reason}",
                {"is_given_up": True, "failed_starts": failed.model_dump(mode="json")},
            )

    async def show_queue(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Export the queue's length, in an endless loop: Ray drops a gauge that is not set for 20 s. ``sleep``: in
        seconds."""
        while True:
            record(table.QUEUE_SEQUENCES, sum(each.queue.sequences for each in (self, *self._groups)))
            await sleep(_SHOW_QUEUE_S)

    def _room(self) -> int:
        limit = self._limits.sequences_per_replica
        return limit if self._fleet is None else self._fleet.room(limit, self._share)

    def _listen(self) -> None:
        """Notify the queue of changes of the fleet, in the event loop of the calls."""
        if self._fleet is None or self._is_listening:
            return
        self._is_listening, loop = True, asyncio.get_running_loop()

        def changed(can_take_others: bool) -> None:
            with suppress(RuntimeError):  # the loop is closed, because this process ends
                loop.call_soon_threadsafe(self.queue.fleet_changed, can_take_others)

        self._fleet.listen(changed)

    def _not_placed(self, call: GenerateCall, refusals: list[RolloutServiceError]) -> RolloutServiceError:
        if refusals:
            return refusals[-1]
        return Overloaded(
            f"no replica had room for the rest of {call.request_id} within engine.replica_wait_s="
            f"{self._limits.replica_wait_s:g} s: add replicas, or raise it"
        )

    async def _too_early(self, call: GenerateCall, refusals: list[RolloutServiceError]) -> RolloutServiceError:
        for refusal in refusals:
            if "adapters" in refusal.detail:
                waited = f"no replica holds adapter {call.adapter} after {self._limits.version_wait_s} s: "
                return TooEarly(f"{waited}{refusal.message}", refusal.detail)
        live, latest = dict[str, int | None](), None
        with suppress(RolloutServiceError, TimeoutError):
            async with asyncio.timeout(_FLEET_ANSWERS_S):
                fleet = await self._ingest.fleet()
            latest, live = fleet.latest_version, {each.replica_id: each.version for each in fleet.replicas}
        name, version = "exact_version", call.exact_weight_version
        if version is None:
            name, version = "min_weight_version", call.min_weight_version
        is_passed = all(_has_passed(refusal, call) for refusal in refusals)
        when = "any more" if is_passed else f"after {self._limits.version_wait_s} s"
        return TooEarly(
            f"no replica serves {name}={version} {when} (live: {live}): {'' if is_passed else 'push it, or '}ask for "
            "what is live",
            {name: version, "latest_version": latest, "live": live},
        )


def _has_passed(refusal: RolloutServiceError, call: GenerateCall) -> bool:
    """Return True if a replica refused because it serves a newer version than the exact one that the call wants."""
    exact, live = call.exact_weight_version, refusal.detail.get("live_version")
    return isinstance(refusal, TooEarly) and exact is not None and isinstance(live, int) and live > exact


def _size(call: GenerateCall) -> int:
    """Estimate the size of a waiting call in bytes."""
    grammar, reasoning = call.sampling.structured_outputs, call.reasoning
    text = sum(map(len, call.sampling.stop)) + (0 if grammar is None else len(grammar.model_dump_json()))
    text += 0 if reasoning is None else len(str(reasoning.parser_kwargs))
    targets = () if call.scoring is None else call.scoring.target_token_ids or ()
    scored = _BYTES_PER_ROW * len(targets) + _BYTES_PER_TOKEN * sum(map(len, targets))
    return _BYTES_PER_CALL + _BYTES_PER_TOKEN * len(call.prompt_token_ids) + scored + text


def _asks_of_prompt(call: GenerateCall) -> bool:
    """Return True if the reply must have logprobs of the prompt, which replicas do not report. Streams have none."""
    return not call.live and (call.scoring is not None or call.sampling.prompt_logprobs is not None)


def _is_refuted(made: Completion, stopped: Completion) -> bool:
    """Return True if ``_end_at_stop_string`` found no stop string where the engine ended a completion."""
    return made.finish_reason != "abort" and stopped.finish_reason == "abort"


def _end_if_longest(completion: Completion, call: GenerateCall) -> Completion:
    """Mark a lost replica's completion as finished if it has all requested tokens."""
    is_longest = completion.finish_reason == "abort" and len(completion.token_ids) == call.sampling.max_tokens
    return completion.model_copy(update={"finish_reason": "length"}) if is_longest else completion
