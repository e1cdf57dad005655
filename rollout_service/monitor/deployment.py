"""The monitor as a Serve deployment: one replica, without a CPU of its own."""

from typing import TYPE_CHECKING

import torch

from rollout_service.config import ServiceConfig
from rollout_service.monitor.monitor import Monitor
from rollout_service.runtime.drain import Drain
from rollout_service.runtime.logs import log_with_serve
from rollout_service.runtime.rpc import MonitorCalls


class MonitorReplica(Monitor):
    """``Monitor`` in its own process."""

    def __init__(self, config: ServiceConfig) -> None:
        log_with_serve()
        self._drain = Drain(config.scaling.drain_timeout_s)
        self._drain.begin_on_sigterm()
        torch.set_num_threads(1)  # engines on the same machine need the cores
        super().__init__(config.monitor)
        self._drain.serves()

    async def check_health(self) -> None:
        """Raise when this process is about to end. Called by Serve."""
        self._drain.check_health()


if TYPE_CHECKING:
    _: type[MonitorCalls] = MonitorReplica  # its methods are what others call
