import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollout_service.client import RolloutClient
from rollout_service.errors import (
    CommitTimeout,
    ControlTimeout,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    NotReady,
    RolloutServiceError,
    Unauthorized,
)
from rollout_service.protocol.adapters import CONFIG_FILE, TENSORS_FILE, AdapterUpload
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from rollout_service.protocol.upload import BeginUpload, PathSource
from rollout_service.protocol.weights import WeightStatus
from rollout_service.web.errors import error_response
from tests.unit.client.conftest import cancelled
from tests.unit.client.real_ingest import real_ingest
from tests.unit.client.service import Service, Upload, until_disconnected


def begun(service: Service, version: int) -> None:
    service.uploads[version] = Upload(BeginUpload(version=version, source=PathSource(path="/models/a")))


def becomes_live_at_poll(number: int) -> Callable[[Upload], WeightStatus]:
    polls = 0

    def status(upload: Upload) -> WeightStatus:
        nonlocal polls
        polls += 1
        return WeightStatus(version=upload.begin.version, state="live" if polls >= number else "committed")

    return status


async def test_wait_live_polls_until_the_version_is_live(service, client):
    begun(service, 3)
    service.status = becomes_live_at_poll(3)
    assert (await client.wait_live(3)).state == "live"
    assert service.calls("GET", "/v1/weights/3") == 3


async def test_wait_live_says_which_replica_is_behind(service, client):
    begun(service, 3)
    behind = ReplicaStatus(replica_id="r7", version=2, state="stale", target=3, error="disk full")
    service.status = lambda upload: WeightStatus(version=3, state="committed", replicas=(behind,))
    with pytest.raises(CommitTimeout, match="r7: stale at version 2, loading 3, disk full") as caught:
        await client.wait_live(3, timeout_s=0.2)
    assert caught.value.detail["replicas"][0]["replica_id"] == "r7"


async def test_wait_live_for_an_unknown_version_fails_at_once(service, client):
    with pytest.raises(NotFound, match="no version 9"):
        await client.wait_live(9)
    assert service.calls("GET", "/v1/weights/9") == 1


async def test_a_staged_version_can_be_discarded(service, client):
    begun(service, 3)
    await client.discard(3)
    with pytest.raises(NotFound):
        await client.discard(3)


async def test_pauses_and_sleep_reach_the_service():
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, json={"is_paused": True, "is_sleeping": True})

    async with RolloutClient("http://service", transport=httpx.MockTransport(answer)) as client:
        await client.pause()
        await client.pause("wait")
        assert await client.is_paused()
        await client.resume()
        await client.sleep()
        assert await client.is_sleeping()
        await client.wake_up()
    assert seen == [
        *("POST /pause?mode=keep", "POST /pause?mode=wait", "GET /is_paused", "POST /resume"),
        *("POST /sleep?level=2&mode=abort", "GET /is_sleeping", "POST /wake_up"),
    ]


@pytest.mark.parametrize(
    "delete",
    [lambda client: client.remove_adapter("run-a"), lambda client: client.discard(3)],
    ids=["adapter", "version"],
)
async def test_what_a_refused_attempt_has_deleted_is_deleted(delete):
    replies = [error_response(NotReady("the ingest died with this call")), error_response(NotFound("there is none"))]

    async def answer(_: httpx.Request) -> httpx.Response:
        reply = replies.pop(0)
        return httpx.Response(reply.status_code, content=bytes(reply.body), headers={"Retry-After": "0"})

    async with RolloutClient("http://service", transport=httpx.MockTransport(answer)) as client:
        await delete(client)
        assert replies == []
        replies.append(error_response(NotFound("there is none")))
        with pytest.raises(NotFound):
            await delete(client)


async def test_a_pause_that_times_out_is_sent_once(model, tmp_path, monkeypatch):
    async with real_ingest(model, tmp_path / "log") as service, RolloutClient(service.url, retries=1) as client:
        await service.ingest.report(ReplicaStatus(replica_id="deaf", version=0, state="ready"))
        asked, set_paused = list[bool](), service.ingest.set_paused

        def count(paused: bool, *how: object, **more: object) -> Awaitable[None]:
            asked.append(paused)
            return set_paused(paused, *how, **more)

        monkeypatch.setattr(service.ingest, "set_paused", count)
        with pytest.raises(ControlTimeout, match="not every replica is paused"):
            await client._switch("/pause", timeout_s="0.01")
        assert asked == [True]


@pytest.mark.parametrize("name", ["run#old", "run?x", "run/a", "../weights", "..", "run%2Fa", "run-a@3", "", "run\n"])
async def test_a_name_that_no_adapter_has_reaches_no_route(service, client, name):
    for call in (
        lambda: client.push_adapter(name, {}, config={}),
        lambda: client.rollback_adapter(name, 1),
        lambda: client.remove_adapter(name),
    ):
        with pytest.raises(InvalidRequest, match="is no name of an adapter"):
            await call()
    assert service.log == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda client: client.push_adapter("a", {}, version=True), "version: .*not a boolean"),
        (lambda client: client.push_adapter("a", {}, label=7), "label"),
        (lambda client: client.rollback_adapter("a", True), "rollback_to: .*not a boolean"),
        (lambda client: client.push_weights(1, [], mode="now"), "mode"),
        (lambda client: client.push_weights(True, [("a", torch.zeros(1))]), "version: .*not a boolean"),
        (lambda client: client.push_path(1, "/a", timeout_s=0), "timeout_s"),
        (lambda client: client.rollback(True), "to: .*not a boolean"),
    ],
)
async def test_a_wrong_argument_is_named_and_reaches_no_route(service, client, call, says):
    with pytest.raises(InvalidRequest, match=says):
        await call(client)
    with pytest.raises(InvalidRequest, match="ttl_s"):
        client.session(ttl_s=0)
    assert service.log == []


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, f"{CONFIG_FILE} cannot be read: No such file"),
        ({CONFIG_FILE: b"{}", "adapter_model.bin": b""}, f"{TENSORS_FILE} cannot be read: No such file"),
        ({CONFIG_FILE: b"{"}, "is not JSON"),
        ({CONFIG_FILE: b"\xff\xfe\xff"}, "is not JSON"),
        ({CONFIG_FILE: b"[]"}, "holds no JSON object, but a list"),
        ({CONFIG_FILE: b"{}", TENSORS_FILE: b""}, "is no safetensors file: it has 0 bytes"),
        ({CONFIG_FILE: b"{}", TENSORS_FILE: b"version https://git-lfs"}, "is no safetensors file: it has 23 bytes"),
    ],
    ids=["no folder", "no safetensors", "no JSON", "no text", "no object", "empty", "Git LFS"],
)
async def test_a_folder_that_is_no_adapter_says_what_to_do(service, client, tmp_path, files, complaint):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=f"{complaint}.*; save the adapter with PEFT's save_pretrained"):
        await client.push_adapter("run-a", tmp_path)
    assert service.log == []


@pytest.mark.parametrize("config", [{"lora_alpha": float("nan")}, {("r",): 8}, [8], 8], ids=str)
async def test_a_configuration_that_is_not_peft_s_is_refused(service, client, config):
    with pytest.raises(InvalidRequest, match="give PEFT's LoraConfig"):
        await client.push_adapter("run-a", {"w": torch.ones(2, 2)}, config=config)
    assert service.log == []


async def test_an_adapter_with_a_tensor_that_has_no_bytes_is_refused(service, client):
    for tensor in torch.ones(2, 2, device="meta"), torch.ones(2, 2).to_sparse(), None:
        with pytest.raises(InvalidManifest, match=r"tensor w cannot be sent: .*; "):
            await client.push_adapter("run-a", {"w": tensor}, config={})
    assert service.log == []


async def test_a_failed_part_of_an_adapter_ends_the_others(tmp_path):
    (tmp_path / CONFIG_FILE).write_text(json.dumps({}))
    (tmp_path / TENSORS_FILE).write_bytes(bytes(40))
    second = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            upload = AdapterUpload(digest="a", missing=tuple(range(10)), part_bytes=4)
            return httpx.Response(200, json=upload.model_dump(mode="json"))
        if request.url.path.endswith("/0"):
            await second.wait()
            error = InsufficientStorage("full")
            return httpx.Response(error.http_status, json=error.to_wire())
        second.set()
        return await asyncio.Future()  # until it is cancelled

    before = asyncio.all_tasks()
    async with RolloutClient("http://service", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(InsufficientStorage):
            await client.push_adapter("run-a", tmp_path)
        assert asyncio.all_tasks() == before


async def test_the_fleet_and_the_models_are_read(service, client):
    replica = ReplicaStatus(replica_id="r1", version=3, state="ready", running=2)
    fleet = Fleet(latest_version=3, paused=False, replicas=(replica,))
    service.json_at("GET", "/v1/fleet", fleet.model_dump(mode="json"))
    service.json_at("GET", "/v1/models", {"object": "list", "data": [{"id": "tiny", "object": "model"}]})
    service.answers["GET", "/v1/fleet"].append(NotReady("starting"))  # a read is tried again
    assert await client.fleet() == fleet
    assert await client.models() == ["tiny"]
    service.answers["GET", "/v1/fleet"].append(JSONResponse({"workers": []}))
    with pytest.raises(RolloutServiceError, match="cannot read"):
        await client.fleet()


async def test_health_is_one_attempt(service, client):
    service.json_at("GET", "/health", {})
    assert await client.health()
    for count, error in enumerate((NotReady("starting"), RolloutServiceError("a proxy's"), NotFound("x")), start=2):
        service.answers["GET", "/health"].append(error)
        assert not await client.health() and service.calls("GET", "/health") == count
    service.token = "secret"
    with pytest.raises(Unauthorized):
        await client.health()
    async with RolloutClient("http://127.0.0.1:9") as nowhere:
        assert not await nowhere.health()


async def test_control_calls_do_not_wait_for_generations(service):
    accepted = asyncio.Event()

    async def hang(request: Request) -> Response:
        accepted.set()
        await until_disconnected(request)
        return Response()

    service.generate = hang
    async with RolloutClient(service.url, max_connections=1) as client:
        generation = asyncio.create_task(client.generate([1]))
        await accepted.wait()
        assert await client.weights() == []
        await cancelled(generation)
