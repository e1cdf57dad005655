"""The shadow as a Serve deployment: one unquantized engine that follows the log of unquantized versions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.handle import DeploymentHandle

from rollout_service.config import ServiceConfig
from rollout_service.config.engine import KVCacheConfig, QuantConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args
from rollout_service.engine.plugin import register
from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import EngineFailed
from rollout_service.model.hub import with_model_here
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.scoring import ScoreCall
from rollout_service.runtime.drain import Drain
from rollout_service.runtime.logs import log_with_serve
from rollout_service.runtime.rpc import ShadowCalls, ingest_client, monitor_client
from rollout_service.shadow.scorer import Scorer
from rollout_service.shadow.watch import LogWatch
from rollout_service.store.log import WeightLog
from rollout_service.store.node_cache import find_log
from rollout_service.store.unquantized import unquantized_root

STEP_TOKENS = 2048
"""Tokens prefilled in one step: the logits of all of them are in memory at once, in fp32."""


def shadow_config(config: ServiceConfig) -> ServiceConfig:
    """Return the configuration without the features whose error is measured: with BF16 weights and KV cache."""
    engine = config.engine.model_copy(
        update={
            "max_num_seqs": config.shadow.max_num_seqs,
            "gpu_memory_utilization": config.shadow.gpu_memory_utilization,
            # nobody waits while it loads, and a second copy of BF16 weights would be large
            "staging": "none",
            "return_sampling_mask": False,  # it scores at temperature 1 without truncation
            "return_routed_experts": False,
            # RoPE settings belong to the model; other settings, such as speculation, may only affect sampling
            "extra": {name: value for name, value in config.engine.extra.items() if name == "hf_overrides"},
        }
    )
    weights = config.weights.model_copy(update={"root": unquantized_root(config.weights.root)})
    bf16 = {"quant": QuantConfig(weights="none"), "kv_cache": KVCacheConfig(dtype="bfloat16")}
    return config.model_copy(update={**bf16, "engine": engine, "weights": weights})


class ShadowReplica:
    """The shadow engine. Called only by gateways. It may run for long without a loaded version.

    Raises ValueError if it does not see the log.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServiceConfig, ingest: DeploymentHandle, monitor: DeploymentHandle
    ) -> None:
        log_with_serve()
        self._drain = Drain(config.scaling.drain_timeout_s)
        self._drain.begin_on_sigterm()
        register()
        found, copies = await find_log(config.weights, ingest_client(ingest))
        config = config.model_copy(update={"weights": found})
        if copies is not None:
            raise ValueError(
                f"the shadow does not see the ingest's log under weights.root ({config.weights.root}): put the log on "
                "a shared file system, or keep both on one node through weights.ingest_resources"
            )
        config = await asyncio.to_thread(with_model_here, config)
        model, mine = ServedModel.of(config.model), shadow_config(config)
        args = replace(engine_args(mine, (), model.has_tokenizer), max_num_batched_tokens=STEP_TOKENS)
        self._engine = EngineAdapter(args, load_limit_s=config.engine.load_limit_s, exports=False)
        try:
            await self._engine.connect()
        except BaseException:
            self._engine.shutdown()
            raise
        self._weight_sync = WeightSync(
            serve.get_replica_context().replica_id.unique_id,
            self._engine,
            LogWatch(WeightLog(mine.weights.root_here()), mine.weights.poll_s),
            mine.weights,
            model.fingerprint,
        )
        self._starting = asyncio.create_task(self._weight_sync.start())
        self._scorer = Scorer(
            self._engine,
            self._weight_sync,
            monitor_client(monitor),
            config.shadow.version_wait_s,
            mine.engine.max_model_len,
        )
        self._drain.serves()

    async def score(self, calls: Sequence[ScoreCall]) -> None:
        """Score completions and report to the monitor; see ``Scorer.score``."""
        await self._scorer.score(calls)

    async def check_health(self) -> None:
        """Raise if the engine is dead or half updated, no longer follows the log, or is about to end. Called by
        Serve."""
        self._drain.check_health()
        await self._engine.check_health()
        if self._starting.done() and (error := self._starting.exception()) is not None:
            raise EngineFailed(f"the shadow could not load its first version: {error}") from error
        self._weight_sync.check_health()

    async def __del__(self) -> None:  # Serve awaits destructors
        if hasattr(self, "_weight_sync"):  # the constructor may have failed before
            self._starting.cancel()
            self._weight_sync.stop()
            self._engine.shutdown()


if TYPE_CHECKING:
    _: type[ShadowCalls] = ShadowReplica  # its methods are what others call
