"""The ingest as a Serve deployment with one replica, optionally on a share of a GPU."""

import asyncio
import logging
from typing import TYPE_CHECKING

import ray

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_server import UploadServer
from rollout_service.model.hub import with_model_here
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.weight_transfer import TransferStatus
from rollout_service.runtime.drain import Drain
from rollout_service.runtime.logs import log_with_serve
from rollout_service.runtime.rpc import IngestCalls
from rollout_service.store.log import WeightLog
from rollout_service.store.log_place import claim_log_place

logger = logging.getLogger(__name__)


class IngestReplica(Ingest):
    """``Ingest`` and its upload listener. Every public coroutine can be called through the deployment's handle."""

    async def __init__(self, config: ServiceConfig) -> None:  # type: ignore[misc]  # Serve awaits constructors
        log_with_serve()
        self._drain = Drain(config.scaling.drain_timeout_s)
        self._drain.begin_on_sigterm()
        place = await asyncio.to_thread(lambda: claim_log_place(with_model_here(config)))
        logger.info("the log lies at %s: %s", place.root, place.why)
        weights = config.weights.model_copy(update={"root": place.root})
        empty = WeightLog(place.root).head() is None
        here = await asyncio.to_thread(with_model_here, config, weights=empty)
        super().__init__(here.model_copy(update={"weights": weights}), place)
        self._listener = UploadServer(
            self,
            config.weights.upload_host,
            config.weights.upload_port,
            config.weights.upload_certificate,
        )
        self._listener.start()
        node = ray.get_runtime_context().get_node_id()
        self.upload_address = UploadAddress(
            self._listener.host,
            self._listener.port,
            ray.util.get_node_ip_address(),
            node,
            advertised=config.weights.upload_advertise_address,
            certificate=self._listener.certificate,
        )
        await self.start()
        self._drain.serves(self._end)

    async def weight_transfer(self) -> TransferStatus:
        """See ``WeightTransfer.status``."""
        return self.transfer.status()

    async def kv_cache_choice(self) -> KVCacheChoice | None:
        """See ``KVCacheCoordinator.kv_cache_choice``."""
        return self.kv.kv_cache_choice()

    async def check_health(self) -> None:
        """Raise if the listener or a background task has ended, or if this process has released the log in order to
        end. Called by Serve."""
        if not self._drain.begun:
            await self._listener.check_health()
            self.check_tasks()
        elif self._drain.done:  # not earlier: Serve would start a successor, which needs the log
            self._drain.check_health()

    async def _end(self) -> None:
        await self._listener.stop()
        await self.stop()

    async def __del__(self) -> None:  # Serve awaits destructors
        if hasattr(self, "_listener"):
            await self._end()


if TYPE_CHECKING:
    _: type[IngestCalls] = IngestReplica  # its methods are called by other processes
