import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from rollout_service.model.served_model import ServedModel
from tests.unit.ingest.trainer import Restart, Start, config_of, started


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts ingests, which end with the test."""
    async with AsyncExitStack() as running:

        async def start(model: Path, root: Path, **sections: dict[str, object]) -> Ingest:
            return await running.enter_async_context(started(config_of(model, root, **sections).resolved()))

        yield start


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


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, for a log."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def fingerprint(model: Path) -> str:
    return ServedModel.load(model).fingerprint
