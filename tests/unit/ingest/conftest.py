from collections.abc import AsyncIterator

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from tests.unit.ingest.trainer import Restart


@pytest.fixture
async def restarted(config: ServiceConfig, ingest: Ingest) -> AsyncIterator[Restart]:
    """Ends the ingest that runs and starts another on the same log."""
    running = [ingest]

    async def restart(other: ServiceConfig | None = None) -> Ingest:
        await running[-1].stop()
        running.append(Ingest(other or config))
        await running[-1].start()
        return running[-1]

    yield restart
    await running[-1].stop()
