"""The session store as a Serve deployment with one replica, for services with several gateways."""

from rollout_service.config import ServiceConfig
from rollout_service.runtime.drain import Drain
from rollout_service.runtime.logs import log_with_serve
from rollout_service.sessions.store import SessionStore


class SessionsReplica(SessionStore):
    """``SessionStore`` in its own process. Sessions are kept in memory and are lost when the process ends."""

    def __init__(self, config: ServiceConfig) -> None:
        log_with_serve()
        self._drain = Drain(config.scaling.drain_timeout_s)
        self._drain.begin_on_sigterm()
        super().__init__()
        self._drain.serves()

    async def check_health(self) -> None:
        """Fail Serve's health check once this process is draining."""
        self._drain.check_health()
