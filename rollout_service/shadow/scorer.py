"""Score completions with the version that sampled them, or not at all."""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from rollout_service.errors import InvalidRequest, NonFiniteLogprob
from rollout_service.metrics import table
from rollout_service.metrics.process import record
from rollout_service.protocol.scoring import ScoreCall
from rollout_service.runtime.rpc import MonitorCalls

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The methods of the engine adapter that the scorer uses."""

    async def score(self, request_id: str, token_ids: tuple[int, ...]) -> tuple[tuple[float, ...], int]: ...


class Follows(Protocol):
    """The methods of ``WeightSync`` that the scorer uses."""

    @property
    def version(self) -> int | None: ...

    def holds(self, version: int) -> bool: ...

    async def wait_version(self, version: int, timeout_s: float) -> bool: ...


class Scorer:
    """Compares replicas with the unquantized engine, and reports to the monitor."""

    def __init__(
        self, engine: Engine, weight_sync: Follows, monitor: MonitorCalls, version_wait_s: float, max_model_len: int
    ) -> None:
        """``max_model_len``: longest context of the engine, in tokens."""
        self._engine, self._weight_sync, self._monitor = engine, weight_sync, monitor
        self._version_wait_s, self._max_prompt = version_wait_s, max_model_len - 1
        self._given_up = -1
        """A version that did not arrive in time: the scorer does not wait again for it or older ones."""

    async def score(self, calls: Sequence[ScoreCall]) -> None:
        """Score and report all calls. Raises EngineFailed, or NotReady if the monitor does not answer."""
        by_version: dict[int, list[ScoreCall]] = defaultdict(list)
        for call in calls:
            by_version[call.version].append(call)
        for version, of_version in sorted(by_version.items()):
            if await self._is_at(version):
                await self._score(version, of_version)
            else:
                record(table.SHADOW_COMPLETIONS, len(of_version), outcome="version")

    async def _is_at(self, version: int) -> bool:
        wait_s = self._version_wait_s if version > self._given_up else 0.0
        if not await self._weight_sync.wait_version(version, wait_s) and version > self._given_up:
            self._given_up = version
            logger.warning(
                "the shadow has waited %g s for version %d and measures nothing of it: it is at %s",
                wait_s, version, self._weight_sync.version,
            )  # fmt: skip
        return self._weight_sync.holds(version)

    async def _score(self, version: int, calls: list[ScoreCall]) -> None:
        # the engine may have changed to a later version meanwhile: each result has the version of its last token
        results = await asyncio.gather(*map(self._reference, calls))
        rows: dict[str, list[tuple[tuple[float, ...], tuple[float, ...]]]] = defaultdict(list)
        outcomes: dict[str, int] = defaultdict(int)
        for call, result in zip(calls, results, strict=True):
            outcome = "failed" if result is None else "scored" if result[1] == version else "version"
            outcomes[outcome] += 1
            if result is not None and outcome == "scored" and result[0]:
                rows[call.replica_id].append((call.logprobs[: len(result[0])], result[0]))
        for replica_id, pairs in rows.items():
            sampled, reference = [list(pair[0]) for pair in pairs], [list(pair[1]) for pair in pairs]
            await self._monitor.observe("shadow", version, replica_id, sampled, reference)
        for outcome, count in outcomes.items():
            record(table.SHADOW_COMPLETIONS, count, outcome=outcome)

    async def _reference(self, call: ScoreCall) -> tuple[tuple[float, ...], int] | None:
        """Return the logprobs of the completion's tokens, up to the engine's context, and their version."""
        tokens = (call.prompt_token_ids + call.token_ids)[: self._max_prompt]
        try:
            logprobs, version = await self._engine.score(f"shadow-{uuid.uuid4().hex}", tokens)
        except (InvalidRequest, NonFiniteLogprob) as error:
            logger.warning("a completion of version %d could not be scored: %s", call.version, error)
            return None
        return logprobs[len(call.prompt_token_ids) - 1 :], version
