"""The service's settings in verl's configuration: ``rollout.checkpoint_engine.engine_kwargs.rollout_service``.

verl passes them to the checkpoint engine on every rank of the trainer. The replica reads them from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollout_service.client._client import RolloutClient
from rollout_service.client._push import Quantize
from rollout_service.client._sync import SyncRolloutClient
from rollout_service.protocol.base import Frozen

NAME = "rollout_service"
"""Name of the rollout and of the checkpoint engine's backend."""


class ServiceSettings(Frozen):
    """Address of the service, and options for sending weights. Unknown fields are an error."""

    url: str
    """Address of the gateway, e.g. ``http://10.0.0.5:8000``."""
    token_file: Path | None = None
    """File with the bearer token, on every node. None: the service requires none. The configuration itself must not
    hold the token, because verl prints it."""
    quantize: Quantize = "service"
    """See ``RolloutClient.push_weights``."""
    timeout_s: float = 1800.0
    """Maximum seconds from a version's commit until every live replica serves it."""

    def client(self) -> RolloutClient:
        """Return a client for the running event loop. The caller must close it."""
        return RolloutClient(self.url, token=self._token())

    def blocking_client(self) -> SyncRolloutClient:
        """Return a blocking client, for code that an event loop runs without ``await``. The caller must close it."""
        return SyncRolloutClient(self.url, token=self._token())

    def _token(self) -> str | None:
        return None if self.token_file is None else self.token_file.read_text().strip()


def settings_of(engine_kwargs: Mapping[str, Mapping[str, object]]) -> ServiceSettings:
    """Return the settings in ``rollout.checkpoint_engine.engine_kwargs``. Raises ValueError if they are missing or
    invalid."""
    given = engine_kwargs.get(NAME)
    if given is None:
        raise ValueError(
            "the address of the rollout service is missing: set actor_rollout_ref.rollout.checkpoint_engine."
            f"engine_kwargs.{NAME}.url=http://HOST:PORT"
        )
    return ServiceSettings.model_validate(dict(given))


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's actor."""
    return f"rollout_service_server_{replica_rank}"
