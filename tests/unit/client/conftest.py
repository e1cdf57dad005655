from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_service.client import RolloutClient
from tests.unit.client.service import Service, serving, serving_in_a_thread


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """A service in the event loop of the test."""
    async with serving(Service()) as service:
        yield service


@pytest.fixture
async def client(service: Service) -> AsyncIterator[RolloutClient]:
    """A client of ``service``."""
    async with RolloutClient(service.url) as client:
        yield client


@pytest.fixture
def threaded_service() -> Iterator[Service]:
    """A service in a thread of its own."""
    with serving_in_a_thread(Service()) as service:
        yield service
