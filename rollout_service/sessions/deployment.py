"""The open sessions as a Serve deployment: one replica, where several gateways share them."""

from rollout_service.config import ServiceConfig
from rollout_service.drain import Drain
from rollout_service.logs import log_with_serve
from rollout_service.sessions.store import Sessions


class SessionsReplica(Sessions):
    """``Sessions`` in a process of its own. What is in memory ends with it."""

    def __init__(self, config: ServiceConfig) -> None:
        log_with_serve()
        self._drain = Drain(config.scaling.drain_timeout_s)
        self._drain.begin_on_sigterm()
        super().__init__()
        self._drain.serves()

    async def check_health(self) -> None:
        """Serve's health check: fails when this process is to end."""
        self._drain.check_health()
