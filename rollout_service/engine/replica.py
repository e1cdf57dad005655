"""The engine as a Serve deployment: one vLLM engine that follows the weight log."""

import time
from typing import Any

from ray import serve

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.admission import AdmissionLimit
from rollout_service.engine.args import engine_args, not_converted
from rollout_service.engine.follower import Follower
from rollout_service.engine.load import autoscaling_stats, show_load
from rollout_service.engine.plugin import register
from rollout_service.engine.starting import Announcement
from rollout_service.errors import EngineFailed, NotReady, Overloaded, TooEarly
from rollout_service.routing import STATS_PERIOD_S
from rollout_service.sampling import GenerateCall
from rollout_service.types import ReplicaStatus, Rollout
from rollout_service.weights.copies import copies_for
from rollout_service.weights.served_model import ServedModel

VERSION_WAIT_S = 0.5
"""Longest wait for a version here; then the gateway asks again, and another replica may have it by then."""
DRAINING_AFTER_S = 10 * STATS_PERIOD_S
"""Serve asks routed replicas for their stats every period, and tells none that it is being removed."""


class EngineReplica:
    """Serve routes to it only after its constructor has loaded the newest version."""

    async def __init__(self, config: ServiceConfig, ingest: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        register()
        model = ServedModel.load(config.model.path)
        plan = model.plan(config.quant, config.engine.tensor_parallel_size)
        self._config = config
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._stats_asked_at: float | None = None
        self._admission = AdmissionLimit(config.engine.admission_limit)
        with Announcement(self._replica_id, ingest, config.weights.poll_s) as announcement:
            self._engine = EngineAdapter(engine_args(config, not_converted(model, plan), model.has_tokenizer))
            try:
                await self._engine.connect()
                self._follower = Follower(
                    self._replica_id,
                    self._engine,
                    ingest,
                    config.weights,
                    model.fingerprint,
                    lambda: self._admission.running,
                    self._draining,
                    await copies_for(config.weights.root_here(), ingest, config.weights.poll_s),
                )
                announcement.status = self._follower.status
                await self._follower.start()
            except BaseException:
                self._engine.shutdown()
                raise

    async def generate(self, call: GenerateCall) -> Rollout:
        """The completions of one prompt; cancelling the call aborts them.

        Raises Overloaded, TooEarly or NotReady when this replica refuses, and EngineFailed when it is lost, with its
        ``replica_id`` in the detail; InvalidRequest or NonFiniteLogprob.
        """
        try:
            self._require_sound()
            with self._admission.admit(call.sampling.n, call.origin):
                if call.min_weight_version is not None:
                    await self._wait_version(call.min_weight_version)
                completions = await self._engine.generate(
                    call.request_id, call.prompt_token_ids, call.sampling, call.priority
                )
        except (EngineFailed, NotReady, Overloaded, TooEarly) as error:
            raise type(error)(error.message, {**error.detail, "replica_id": self._replica_id}) from error
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=completions,
            replica_id=self._replica_id,
        )

    async def status(self) -> ReplicaStatus:
        """What this replica says of itself."""
        return self._follower.status()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook: what the router knows of this replica."""
        self._stats_asked_at = time.monotonic()
        status = self._follower.status()
        show_load(status, self._engine.scheduler)
        return {"version": status.version, "state": status.state, "running": self._admission.by_origin()}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what the autoscaling policy knows of this replica."""
        return autoscaling_stats(self._follower.status(), self._engine.scheduler)

    async def check_health(self) -> None:
        """Serve's health check: fails when the engine is dead or half updated, or follows no more.

        The first one is part of starting: a version that was committed meanwhile is loaded before Serve routes here.
        """
        if self._stats_asked_at is None:
            await self._follower.caught_up()
        await self._engine.check_health()
        self._follower.check_health()

    def _draining(self) -> bool:
        asked_at = self._stats_asked_at
        return asked_at is not None and time.monotonic() - asked_at > DRAINING_AFTER_S

    def _require_sound(self) -> None:
        if self._engine.broken is not None:
            raise NotReady(f"replica {self._replica_id} is being replaced: {self._engine.broken}")

    async def _wait_version(self, version: int) -> None:
        wait_s = min(VERSION_WAIT_S, self._config.engine.version_wait_s)
        if not await self._follower.wait_version(version, wait_s):
            raise TooEarly(
                f"replica {self._replica_id} serves version {self._follower.version}, which is behind "
                f"min_weight_version={version}: push it, or ask for what is live",
                {"min_weight_version": version, "live_version": self._follower.version},
            )

    async def __del__(self) -> None:  # Serve awaits destructors
        if hasattr(self, "_follower"):  # the constructor may have failed before, or be running still
            await self._follower.leave()
        if hasattr(self, "_engine"):
            self._engine.shutdown()
