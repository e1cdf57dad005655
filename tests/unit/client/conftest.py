import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from rollout_service.client import RolloutClient
from rollout_service.model.convert import tensor_bytes
from tests.unit.client.real_ingest import RealIngest
from tests.unit.client.service import Service, serving, serving_in_a_thread

Tensors = dict[str, torch.Tensor]


def stream_of(tensors: Tensors) -> bytes:
    """All bytes of an upload."""
    return b"".join(bytes(tensor_bytes(tensor)) for tensor in tensors.values())


def with_nan(tensors: Tensors) -> Tensors:
    """The tensors of a model, one element of which is no number: ``model.norm.weight[3]``."""
    bad = {name: tensor.clone() for name, tensor in tensors.items()}
    bad["model.norm.weight"][3] = torch.nan
    return bad


async def cancelled(call: asyncio.Task[object]) -> None:
    """Cancel a call, and wait until it has ended by that."""
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.fixture
def tensors() -> Tensors:
    """Ten parts of 1024 bytes."""
    return {f"layer{i}": torch.full((512,), float(i)).bfloat16() for i in range(10)}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """A service in the event loop of the test."""
    async with serving(Service()) as service:
        yield service


@pytest.fixture
async def client(service: Service | RealIngest) -> AsyncIterator[RolloutClient]:
    """A client of ``service``."""
    async with RolloutClient(service.url) as client:
        yield client


@pytest.fixture
async def direct(service: Service) -> AsyncIterator[Service]:
    """A listener for parts, which ``service`` announces."""
    async with serving(Service()) as direct:
        direct.uploads, service.upload_url = service.uploads, direct.url
        yield direct


@pytest.fixture
def threaded_service() -> Iterator[Service]:
    """A service in a thread of its own."""
    with serving_in_a_thread(Service()) as service:
        yield service
