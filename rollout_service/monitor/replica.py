"""The monitor as a Serve deployment: one replica, without a CPU of its own."""

import torch

from rollout_service.config import MonitorConfig
from rollout_service.logs import log_with_serve
from rollout_service.monitor.monitor import Monitor


class MonitorReplica(Monitor):
    """``Monitor`` in a process of its own."""

    def __init__(self, config: MonitorConfig) -> None:
        log_with_serve()
        torch.set_num_threads(1)  # engines on the same machine need the cores
        super().__init__(config)
