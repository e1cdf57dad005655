"""The engine as a Serve deployment: one vLLM engine that follows the weight log."""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.adapters import ReplicaAdapters
from rollout_service.engine.admission import AdmissionLimit, SessionAdmission
from rollout_service.engine.args import attention_of, engine_args, not_converted
from rollout_service.engine.cpu.processor import why_no_fp8_cache
from rollout_service.engine.handover import HandOver
from rollout_service.engine.load_statistics import GatewayQueues, autoscaling_stats, watch_kv_reads
from rollout_service.engine.plugin import register
from rollout_service.engine.progress_reports import ProgressReports
from rollout_service.engine.startup import StartupHeartbeat, report_failed_start, wait_for_free_gpus, wait_until_awake
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import EngineFailed, KVCacheUnfit, NotReady, Overloaded, TooEarly
from rollout_service.fleet.autoscaling import BLOCKED
from rollout_service.kv_scales.cache_choice import (
    CacheChooser,
    choose_bf16,
    random_sequences,
    starting_choice,
    with_kv_cache,
    without_fp8,
)
from rollout_service.metrics.process import set_load
from rollout_service.model.hub import with_model_here
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import AttentionStatus, EngineLoad, KVCacheChoice, ReplicaStatus
from rollout_service.protocol.progress import ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.runtime.drain import Drain, end_process
from rollout_service.runtime.logs import log_with_serve
from rollout_service.runtime.rpc import EngineCalls, ingest_client, monitor_client, until_answered
from rollout_service.runtime.tasks import start_watch
from rollout_service.store.adapters import AdapterStore
from rollout_service.store.node_cache import NodeCache, find_log
from rollout_service.tracing import describe

logger = logging.getLogger(__name__)

VERSION_WAIT_S = 0.5
"""Maximum wait for a version on this replica in seconds. The gateway then asks again, possibly on another replica."""
_INGEST_S = 2.0
"""Timeout in seconds for calls to the ingest, which may be ending at the same time."""
_TAKES_REQUESTS = ("ready", "syncing", "stale")


class EngineReplica:
    """A Serve replica. Serve routes requests to it only after its constructor has loaded the newest version."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServiceConfig, ingest: DeploymentHandle, monitor: DeploymentHandle, group: str | None = None
    ) -> None:
        """``group``: its group in ``scaling.groups``, whose version it serves. None: it follows the newest version."""
        async with report_failed_start(ingest, group):
            log_with_serve()
            self._group = group
            self._drain = Drain(config.scaling.drain_timeout_s)
            self._drain.begin_on_sigterm()
            register()
            config = await asyncio.to_thread(with_model_here, config)
            model = ServedModel.of(config.model)
            self._config, self._ingest, self._monitor = config, ingest_client(ingest), monitor_client(monitor)
            self._replica_id = serve.get_replica_context().replica_id.unique_id
            self._routed, self._blocked = False, 0
            self._admission = AdmissionLimit(config.engine.sequences_per_replica, config.sequences_per_gateway)
            self._queues = GatewayQueues()
            self._hand_over = HandOver(self._drain, self._admission, self._others_serve)
            weights, copies = await find_log(config.weights, self._ingest)
            self._config = config.model_copy(update={"weights": weights})
            poll_s = config.weights.poll_s
            with StartupHeartbeat(self._replica_id, ingest, poll_s, group) as announcement:
                if config.engine.enable_sleep_mode:
                    await wait_until_awake(self._ingest, poll_s)
                share, devices = config.engine.gpu_memory_utilization, ray.get_runtime_context().get_accelerator_ids()
                await wait_for_free_gpus(devices.get("GPU", []), share, announcement.waits_for, self._others_serve)
                known = await until_answered(self._ingest.kv_cache_choice, poll_s)
                choice = starting_choice(config.kv_cache.dtype, model, known)
                if config.kv_cache.dtype == "auto" and (why := why_no_fp8_cache()) is not None:
                    choice = await without_fp8(self._ingest, choice, why, self._replica_id, poll_s)
                if config.engine.enable_sleep_mode:
                    await announcement.take_memory(self._ingest)
                try:
                    await self._start(model, choice, copies, announcement)
                except KVCacheUnfit as unfit:
                    if config.kv_cache.dtype != "auto":
                        raise
                    choice = await choose_bf16(self._ingest, unfit.message, str(unfit.detail["judged_by"]), poll_s)
                    await self._start(model, choice, copies, announcement)
            self._watching = start_watch("watching for a removal", self._hand_over.watch(self._engine))
            if "group" in self._engine.attention_backends:
                self._counting = start_watch("counting KV reads", watch_kv_reads(self._engine.kv_reads))
            self._drain.serves(self._end)

    async def _start(
        self,
        model: ServedModel,
        choice: KVCacheChoice | None,
        copies: NodeCache | None,
        announcement: StartupHeartbeat,
    ) -> None:
        """Start an engine on the newest version. ``choice``: of its KV cache. None: FP8, if it is accurate enough."""
        config = self._config if choice is None else with_kv_cache(self._config, choice)
        sizes = config.engine.tensor_parallel_size, config.engine.expert_parallel
        plan = await asyncio.to_thread(model.plan, config.quant, *sizes)  # may run vLLM in another process
        left_in_bf16 = not_converted(model, plan)
        args = engine_args(config, left_in_bf16, model.has_tokenizer)
        why = attention_of(config).why
        self._engine = EngineAdapter(args)
        self._progress = ProgressReports(self._engine.tokens_since)
        self._sessions = SessionAdmission(self._engine.kv_cache_tokens, self._engine.scheduler)
        try:
            await self._engine.connect()
            max_adapters = config.engine.adapters.max_live if self._group is None else 0
            root = config.weights.root_here() if copies is None else copies.log.root
            self._adapters = ReplicaAdapters(
                self._engine,
                AdapterStore(root),
                max_adapters,
                lambda: self._weight_sync.digest,
                None if copies is None else self._ingest,
            )
            self._weight_sync = WeightSync(
                self._replica_id,
                self._engine,
                self._ingest,
                config.weights,
                model.fingerprint,
                lambda: self._admission.running,
                lambda: self._hand_over.draining,
                copies,
                CacheChooser(
                    self._replica_id,
                    self._engine,
                    self._ingest,
                    random_sequences(model.vocab_size, config.engine.max_model_len),
                    choice,
                    config.weights.poll_s,
                    falls_back=config.kv_cache.dtype == "auto",
                ),
                self._load,
                AttentionStatus(backends=self._engine.attention_backends, why=why),
                self._group,
                self._adapters if max_adapters else None,
                self._monitor if config.weights.kv_max_age == "auto" else None,
            )
            announcement.status = self._weight_sync.status
            await self._weight_sync.start()
        except BaseException as error:
            if isinstance(error, KVCacheUnfit):  # another engine may follow, so the replica must not report a failure
                announcement.start_over()
            self._engine.shutdown()
            raise

    def _load(self) -> EngineLoad:
        return self._engine.scheduler.load(self._admission.running, self._engine.kv_cache_tokens)

    async def generate(self, call: GenerateCall) -> Rollout:
        """Return the completions of one prompt. Cancelling the call aborts them.

        Raises Overloaded, TooEarly or NotReady if this replica refuses, and EngineFailed if the engine is lost. Their
        detail has the ``replica_id``. Raises InvalidRequest or NonFiniteLogprob for the request itself.
        """
        self._hand_over.asked()
        try:
            self._require_sound()
            if call.adapter is not None:
                await self._adapters.wait_for(call.adapter, self._wait_s)  # ``use`` refuses the call otherwise
            await self._wait_version(call)  # a waiting call holds no place, because the version may never come
            returns = self._weight_sync.pausing.returns
            with (
                self._admission.admit(call.sampling.n, call.origin),
                self._sessions.admit(call) as turn,
                self._progress.follow(call) as engine_id,
                self._adapters.use(call.adapter) as adapter,
            ):
                completions = await self._engine.generate(
                    engine_id,
                    call.prompt_token_ids,
                    call.sampling,
                    call.priority,
                    call.cache_salt,
                    call.reasoning,
                    call.partial_tokens,
                    call.exact_weight_version,
                    call.session_id,
                    turn.note_cached,
                    adapter,
                    call.scoring,
                )
                turn.end(completions)
        except (EngineFailed, NotReady, Overloaded, TooEarly) as error:
            raise type(error)(error.message, {**error.detail, "replica_id": self._replica_id}) from error
        rollout = Rollout(
            request_id=call.request_id,
            prompt_token_ids=call.prompt_token_ids,
            completions=self._weight_sync.labels.on(completions),
            replica_id=self._replica_id,
            cached_tokens=turn.cached_tokens,
            returned=self._weight_sync.pausing.returns > returns,
        )
        describe(rollout)
        return rollout

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        """Return the new tokens of a gateway's calls since its last request, with version labels. Waits briefly for the
        first.

        Raises NotReady if the call was meant for a replica that Serve has removed.
        """
        self._hand_over.asked()
        if ask.replica_id != self._replica_id:
            raise NotReady(f"replica {ask.replica_id} takes no more calls: this is {self._replica_id}")
        self._queues.note(ask.origin, ask.queued)
        reply = await self._progress.report(ask)
        made = self._weight_sync.labels.on([piece.made for piece in reply.pieces])
        labelled = [piece.model_copy(update={"made": m}) for piece, m in zip(reply.pieces, made, strict=True)]
        return reply.model_copy(update={"pieces": tuple(labelled)})

    async def status(self) -> ReplicaStatus:
        """Return this replica's status."""
        return self._weight_sync.status()

    async def record_routing_stats(self) -> dict[str, object]:
        """Return the data for the request router. Serve calls this."""
        self._routed = True
        self._hand_over.asked()
        status = self._weight_sync.status()
        load = self._load()  # vLLM's own gauges disappear while it is idle or paused
        set_load(load.running, load.waiting + load.deferred, load.kv_cache_usage)
        return {
            "version": status.version,
            "state": status.state,
            "running": self._admission.by_origin(),
            "capacity": self._config.engine.max_num_seqs,
            # the newest is last
            "adapters": {held.name: held.version for held in status.adapters if held.error is None},
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the data for the autoscaling policy. Serve calls this."""
        stats = autoscaling_stats(self._weight_sync.status(), self._load(), self._queues.sequences())
        with suppress(NotReady, TimeoutError):  # the previous number is good enough
            async with asyncio.timeout(_INGEST_S):
                self._blocked = (await self._ingest.fleet()).blocked_starts
        return {**stats, BLOCKED: float(self._blocked)}

    async def check_health(self) -> None:
        """Fail Serve's health check if the engine is dead or half loaded, the log is not followed, or this process is
        draining.

        The first check belongs to the start: it loads a version committed meanwhile before Serve routes requests here.
        """
        self._hand_over.asked()
        self._drain.check_health()
        if not self._routed:
            await self._weight_sync.caught_up()
        try:
            await self._engine.check_health()
            self._weight_sync.check_health()
        except EngineFailed as lost:
            if self._routed:
                # Serve replaces a replica at once if its process has ended, but else after three failed checks
                logger.error("replica %s ends, and Serve starts another: %s", self._replica_id, lost)
                await self.__del__()
                end_process(1)
            raise  # Serve reports why a replica has not started

    async def _end(self) -> None:
        """Drain this replica. Serve calls ``__del__`` when no call is open any more, and then ends the process."""
        with suppress(NotReady, TimeoutError):  # the next report tells the ingest
            async with asyncio.timeout(_INGEST_S):
                await self._ingest.report(self._weight_sync.status())
        await self._hand_over.hand_over(self._engine)

    async def _others_serve(self) -> bool:
        try:
            async with asyncio.timeout(_INGEST_S):
                fleet = await self._ingest.fleet()
        except (NotReady, TimeoutError):  # unknown
            return False
        others = (r for r in fleet.replicas if r.replica_id != self._replica_id and r.group == self._group)
        return any(replica.version is not None and replica.state in _TAKES_REQUESTS for replica in others)

    def _require_sound(self) -> None:
        if self._drain.begun:
            raise NotReady(f"replica {self._replica_id} got SIGTERM and is being replaced")
        if self._engine.broken is not None:
            raise NotReady(f"replica {self._replica_id} is being replaced: {self._engine.broken}")

    @property
    def _wait_s(self) -> float:
        return min(VERSION_WAIT_S, self._config.engine.version_wait_s)

    async def _wait_version(self, call: GenerateCall) -> None:
        exact = call.exact_weight_version
        version = call.min_weight_version if exact is None else exact
        if version is None:
            return
        if not await self._weight_sync.wait_version(version, self._wait_s, exact=exact is not None):
            here = self._weight_sync.version
            why = f"which is behind min_weight_version={version}" if exact is None else f"not exact_version={exact}"
            raise TooEarly(
                f"replica {self._replica_id} is asleep: POST /wake_up"
                if here is None
                else f"replica {self._replica_id} serves version {here}, {why}: push it, or ask for what is live",
                {"wanted_version": version, "live_version": here},
            )

    async def __del__(self) -> None:  # Serve awaits destructors
        if hasattr(self, "_weight_sync"):  # the constructor may have failed earlier, or be still running
            await self._weight_sync.leave()
        if hasattr(self, "_engine"):
            self._engine.shutdown()


if TYPE_CHECKING:
    _: type[EngineCalls] = EngineReplica  # mypy: other processes call these methods
