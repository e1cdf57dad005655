"""One rollout on however many replicas it takes.

A *refusal* (full, behind the version asked for, being replaced) costs nothing: another replica is asked. An *attempt*
is a generation that began: it may be aborted, and then goes on from its tokens on another replica, or be lost with its
replica, and then starts anew from what was there before. Attempts are bounded.
"""

import asyncio
import time
import uuid
from dataclasses import dataclass

from rollout_service.config.engine import EngineConfig
from rollout_service.errors import DeploymentFailed, EngineFailed, NotReady, Overloaded, RolloutServiceError, TooEarly
from rollout_service.fleet.continuation import joined, kept, named, remainder
from rollout_service.metrics import table
from rollout_service.metrics.process import outcome_of, record
from rollout_service.protocol.rollout import Completion, OnAbort, Rollout
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.rpc import EngineCalls, IngestCalls
from rollout_service.tasks import raise_first_failure

_PAUSE_S = 0.25
"""Between two rounds of asking all replicas."""
_REFUSALS = (Overloaded, TooEarly, NotReady)


@dataclass
class _Progress:
    """What one call has been through."""

    attempts: int = 1
    lost_on: tuple[str, ...] = ()


class Dispatcher:
    """Has calls answered by the engine deployment."""

    def __init__(self, engine: EngineCalls, ingest: IngestCalls, limits: EngineConfig) -> None:
        self._engine, self._ingest, self._limits = engine, ingest, limits
        self._origin = uuid.uuid4().hex

    async def complete(self, call: GenerateCall, on_abort: OnAbort = "continue") -> Rollout:
        """The ``n`` completions of one prompt. Cancelling cancels them wherever they are made.

        With ``on_abort="return"``, when attempts are used up, or when a pause that returns what it aborts was the
        cause, an aborted completion comes back with the tokens it has and ``finish_reason="abort"``.

        Raises Overloaded, TooEarly, NotReady, InvalidRequest, NonFiniteLogprob, or EngineFailed when every attempt
        lost its replica.
        """
        progress = _Progress()
        call = call.model_copy(update={"origin": self._origin})
        rollout = await self._generated(call, progress)
        if on_abort == "return" or rollout.returned or all(c.finish_reason != "abort" for c in rollout.completions):
            return rollout.model_copy(update={"attempts": progress.attempts})
        async with raise_first_failure() as group:
            rests = [
                group.create_task(self._finished(call, completion, rollout.replica_id, progress.attempts))
                for completion in rollout.completions
            ]
        completions, replicas, attempts = zip(*(rest.result() for rest in rests), strict=True)
        last = max(range(len(rests)), key=lambda i: attempts[i])
        return rollout.model_copy(
            update={"completions": completions, "replica_id": replicas[last], "attempts": attempts[last]}
        )

    async def _finished(
        self, call: GenerateCall, completion: Completion, replica_id: str, attempts: int
    ) -> tuple[Completion, str, int]:
        """``completion``, gone on with until it ends by itself or attempts are used up; who made its end; attempts."""
        progress = _Progress(attempts)
        while completion.finish_reason == "abort" and progress.attempts < self._limits.max_attempts:
            progress.attempts += 1
            record(table.CONTINUATIONS, cause="abort")
            base = kept(completion, call.sampling)
            try:
                rollout = await self._generated(remainder(call, base, progress.attempts), progress)
            except (EngineFailed, NotReady):
                break  # what there is goes back to the caller rather than nothing
            completion, replica_id = joined(call, base, rollout.completions[0]), rollout.replica_id
            if rollout.returned:
                break
        return completion, replica_id, progress.attempts

    async def _generated(self, call: GenerateCall, progress: _Progress) -> Rollout:
        """One generation that was not lost with its replica. Raises EngineFailed when attempts are used up."""
        while True:
            try:
                return await self._taken(call, progress)
            except EngineFailed as lost:  # the replica died with the call, or its engine did
                if progress.attempts >= self._limits.max_attempts:
                    raise EngineFailed(
                        f"{call.request_id} lost its replica in attempt {progress.attempts} of "
                        f"{self._limits.max_attempts}: send it again ({lost})",
                        {"attempts": progress.attempts},
                    ) from lost
                progress.attempts += 1
                record(table.CONTINUATIONS, cause="lost")
                replica_id = lost.detail.get("replica_id")
                progress.lost_on += (replica_id,) if isinstance(replica_id, str) else ()

    async def _taken(self, call: GenerateCall, progress: _Progress) -> Rollout:
        """The answer of the first replica that does not refuse."""
        started = time.monotonic()
        refused = set(progress.lost_on)
        while True:
            try:
                avoiding = call.model_copy(update={"avoid": tuple(sorted(refused))})
                return named(await self._engine.generate(avoiding))
            except DeploymentFailed:
                raise
            except _REFUSALS as refusal:
                record(table.REFUSALS, reason=outcome_of(refusal))
                replica_id = refusal.detail.get("replica_id")
                if isinstance(replica_id, str) and replica_id not in refused:
                    refused.add(replica_id)
                    continue
                if time.monotonic() - started >= self._patience_s(refusal, progress):
                    raise await self._last_word(call, refusal) from refusal
            await asyncio.sleep(_PAUSE_S)
            refused.clear()

    def _patience_s(self, refusal: RolloutServiceError, progress: _Progress) -> float:
        if isinstance(refusal, TooEarly):
            return self._limits.version_wait_s
        accepted_before = progress.attempts > 1
        replaced = isinstance(refusal, NotReady) and "replica_id" in refusal.detail
        return self._limits.replica_wait_s if accepted_before or replaced else 0.0

    async def _last_word(self, call: GenerateCall, refusal: RolloutServiceError) -> RolloutServiceError:
        if not isinstance(refusal, TooEarly):
            return refusal
        try:
            fleet = await self._ingest.fleet()
        except RolloutServiceError:
            return refusal  # it names the version of the replica that sent it
        live = {replica.replica_id: replica.version for replica in fleet.replicas}
        return TooEarly(
            f"no replica serves min_weight_version={call.min_weight_version} after {self._limits.version_wait_s} s "
            f"(live: {live}): push it, or ask for what is live",
            {
                "min_weight_version": call.min_weight_version,
                "latest_version": fleet.latest_version,
                "live": live,
            },
        )
