"""Pushes that do not work at the first go."""

import asyncio

import httpx
import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import CommitTimeout, EngineFailed, VersionConflict
from tests.unit.client.conftest import Tensors, stream_of
from tests.unit.client.service import Service, forward


async def fail_at_part(service: Service, client: RolloutClient, tensors: Tensors, part: int) -> None:
    """Push version 5 one part after the other; the service breaks down at one of them."""
    service.answers["PUT", f"/v1/weights/5/parts/{part}"].append(EngineFailed("out of disk"))
    with pytest.raises(EngineFailed, match="out of disk"):
        await client.push_weights(5, tensors, parallel_parts=1)
    assert sorted(service.uploads[5].parts) == list(range(part))
    service.log.clear()


async def test_a_push_goes_on_where_the_last_one_failed(service, client, tensors):
    await fail_at_part(service, client, tensors, 6)
    steps: list[int] = []
    async with RolloutClient(service.url) as restarted:
        await restarted.push_weights(5, tensors, progress=lambda sent, _: steps.append(sent))
    assert sorted(service.parts_sent()) == [6, 7, 8, 9]
    assert service.uploads[5].stream == stream_of(tensors)
    assert (steps[0], steps[-1]) == (1024, 10 * 1024)


async def test_a_push_of_other_bytes_replaces_the_old_ones(service, client, tensors):
    await fail_at_part(service, client, tensors, 6)
    tensors["layer2"] = tensors["layer2"] + 1
    await client.push_weights(5, tensors)
    assert sorted(service.parts_sent())[0] == 2
    assert service.uploads[5].stream == stream_of(tensors)


async def test_a_service_that_lost_everything_is_sent_everything_again(service, client, tensors):
    await fail_at_part(service, client, tensors, 6)
    service.uploads.clear()
    await client.push_weights(5, tensors)
    assert sorted(service.parts_sent()) == list(range(10))


async def test_a_committed_version_is_only_compared(service, client, tensors):
    first = await client.push_weights(5, tensors)
    service.log.clear()
    async with RolloutClient(service.url) as other:
        assert await other.push_weights(5, tensors) == await client.push_weights(5, tensors) == first
        tensors["layer3"] = tensors["layer3"] + 1
        for pusher in (other, client):
            with pytest.raises(VersionConflict, match="part 3 of version 5"):
                await pusher.push_weights(5, tensors)
    assert service.parts_sent() == []


async def test_a_commit_names_the_bytes_that_it_means(service, client, tensors):
    async def mixed(part: int) -> None:
        if part == 9:  # another client's part 2 has taken the place of ours
            service.uploads[5].digests[2] = "0" * 32

    service.before_part = mixed
    with pytest.raises(VersionConflict, match="version 5 has other parts"):
        await client.push_weights(5, tensors, parallel_parts=1)
    assert service.uploads[5].state == "staged"


async def test_a_part_whose_connection_breaks_is_sent_again(tensors):
    service = Service()
    broken: set[str] = set()

    async def break_each_part_once(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT" and request.url.path not in broken:
            broken.add(request.url.path)
            raise httpx.ReadError("connection reset", request=request)
        return await forward(service, request)

    service.url = "http://service"
    transport = httpx.MockTransport(break_each_part_once)
    async with RolloutClient("http://service", transport=transport) as client:
        await client.push_weights(5, tensors, parallel_parts=10)
    assert service.uploads[5].stream == stream_of(tensors)
    assert len(broken) == 10


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda client: client.push_path(5, "/models/a", timeout_s=0.1), "the commit of version 5"),
        (lambda client: client.rollback(4, timeout_s=0.1), "the rollback to 4"),
        (lambda client: client.rollback_adapter("run-a", 3, timeout_s=0.1), "the commit of adapter run-a"),
    ],
)
async def test_an_unanswered_commit_ends_in_a_commit_timeout(service, monkeypatch, call, what):
    monkeypatch.setattr("rollout_service.client._http.COMMIT_GRACE_S", 0.1)
    never = asyncio.Event()

    async def silence(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith(("/commit", "/rollback")):
            await never.wait()
        return await forward(service, request)

    async with RolloutClient("http://service", transport=httpx.MockTransport(silence)) as client:
        with pytest.raises(CommitTimeout, match=rf"has not answered {what} within 0\.2 s"):
            await call(client)
