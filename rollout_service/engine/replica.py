"""The engine as a Serve deployment: one vLLM engine that follows the weight log."""

from typing import Any

from ray import serve

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.admission import AdmissionLimit
from rollout_service.engine.args import engine_args, not_converted
from rollout_service.engine.follower import Follower
from rollout_service.engine.load import autoscaling_stats
from rollout_service.engine.plugin import register
from rollout_service.errors import TooEarly
from rollout_service.sampling import GenerateCall
from rollout_service.types import ReplicaStatus, Rollout
from rollout_service.weights.served_model import ServedModel


class EngineReplica:
    """Serve routes to it only after its constructor has loaded the newest version."""

    async def __init__(self, config: ServiceConfig, ingest: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        register()
        model = ServedModel.load(config.model.path)
        plan = model.plan(config.quant, config.engine.tensor_parallel_size)
        self._config = config
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine = EngineAdapter(engine_args(config, not_converted(model, plan), model.has_tokenizer))
        await self._engine.connect()
        self._admission = AdmissionLimit(config.engine.admission_limit)
        self._follower = Follower(
            self._replica_id, self._engine, ingest, config.weights, model.fingerprint, lambda: self._admission.running
        )
        await self._follower.start()

    async def generate(self, call: GenerateCall) -> Rollout:
        """The completions of one prompt; cancelling the call aborts them.

        Raises Overloaded, TooEarly, InvalidRequest, EngineFailed or NonFiniteLogprob.
        """
        with self._admission.admit(call.sampling.n):
            if call.min_weight_version is not None:
                await self._wait_version(call.min_weight_version)
            completions = await self._engine.generate(call.request_id, call.prompt_token_ids, call.sampling)
        return Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=completions,
            replica_id=self._replica_id,
        )

    async def status(self) -> ReplicaStatus:
        """What this replica says of itself."""
        return self._follower.status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what the autoscaling policy knows of this replica."""
        return autoscaling_stats(self._follower.status(), self._engine.scheduler)

    async def check_health(self) -> None:
        """Serve's health check: fails when the engine is dead or half updated, or follows no more."""
        await self._engine.check_health()
        self._follower.check_health()

    async def _wait_version(self, version: int) -> None:
        wait_s = self._config.engine.version_wait_s
        if not await self._follower.wait_version(version, wait_s):
            raise TooEarly(
                f"replica {self._replica_id} serves version {self._follower.version} and min_weight_version={version} "
                f"did not come within {wait_s} s: push it, or ask for what is live",
                {"min_weight_version": version, "live_version": self._follower.version},
            )

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # the constructor may have failed before
            self._engine.shutdown()
