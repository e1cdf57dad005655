"""Parts and batches go straight to the ingest where it is known to be the ingest, and the token to the gateway only."""

import re
import socket
from collections.abc import Callable, Mapping

import httpx
import pytest

from rollout_service.client import RolloutClient, _part_sender
from rollout_service.errors import QuantizationError, VersionConflict
from rollout_service.protocol.upload import UPLOAD_KEY_HEADER, listener_proof
from tests.unit.client.conftest import Tensors, stream_of
from tests.unit.client.service import Service, forward

Answer = Callable[[httpx.Request], httpx.Response]


async def test_direct_parts_carry_the_upload_key_and_not_the_token(service, direct, tensors):
    service.token, service.upload_url = "secret", f"{direct.url}/"
    async with RolloutClient(service.url, token="secret") as client:
        await client.push_weights(5, tensors)
    assert sorted(direct.parts_sent()) == list(range(10))
    assert service.parts_sent() == [] and service.uploads[5].stream == stream_of(tensors)
    assert not any("authorization" in headers for _, headers in direct.headers)
    keys = {path: headers.get(UPLOAD_KEY_HEADER) for path, headers in direct.headers}
    assert keys.pop("/v1/weights/5/listener") is None
    assert set(keys.values()) == {"key"} and len(keys) == 10


class Network:
    """A gateway, and an address where a test says what answers."""

    def __init__(self, gateway: str, announced: str, answer: Answer) -> None:
        self._gateway, self._announced, self._answer = httpx.URL(gateway), httpx.URL(announced), answer
        self.service = Service()
        self.service.upload_url, self.service.token = announced, "secret"
        self.seen: list[tuple[str, Mapping[str, str], bytes]] = []
        """What came to the announced address: path, headers and body."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        if (request.url.host, request.url.port) == (self._announced.host, self._announced.port):
            self.seen.append((request.url.path, request.headers, body))
            return self._answer(request)
        assert request.url.host == self._gateway.host
        return await forward(self.service, request)

    async def push(self, tensors: Tensors) -> None:
        """A push from the gateway's trainer; it succeeds through the gateway."""
        async with RolloutClient(
            str(self._gateway), token="secret", retries=0, transport=httpx.MockTransport(self)
        ) as client:
            await client.push_weights(5, tensors)
            await client.push_weights(6, tensors)
        assert self.service.uploads[5].stream == self.service.uploads[6].stream == stream_of(tensors)


def proof(key: str) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"proof": listener_proof(key, request.url.params["nonce"])})

    return answer


STRANGERS: dict[str, Answer] = {
    "one that answers 404": lambda _: httpx.Response(404, text="some other local server"),
    "one that answers everything": lambda _: httpx.Response(200, json={}),
    "one that returns what it is sent": lambda r: httpx.Response(200, json={"proof": r.url.params["nonce"]}),
    "one that answers no hexadecimal": lambda _: httpx.Response(200, json={"proof": "ü"}),
    "another service's listener": proof("another key"),
    "one that sends elsewhere": lambda _: httpx.Response(307, headers={"Location": "http://gateway.example/"}),
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_a_stranger_at_the_address_gets_no_token_key_or_weights(stranger, tensors, caplog):
    network = Network("http://gateway.example", "http://127.0.0.1:40123", STRANGERS[stranger])
    await network.push(tensors)
    assert [path for path, _, _ in network.seen] == ["/v1/weights/5/listener"]
    for _, headers, body in network.seen:
        assert "authorization" not in headers and UPLOAD_KEY_HEADER not in headers and body == b""
    assert caplog.text.count("weights go through http://gateway.example, not directly to http://127.0.0.1:40123") == 1


async def test_with_an_https_gateway_weights_are_not_sent_in_plaintext(tensors):
    network = Network("https://gateway.example", "http://10.0.0.7:40123", proof("key"))
    await network.push(tensors)
    assert network.seen == []


@pytest.mark.parametrize("status", [404, 401])
async def test_parts_that_the_listener_refuses_go_through_the_gateway(status, tensors):
    prove = proof("key")

    def listener(request: httpx.Request) -> httpx.Response:
        return prove(request) if request.method == "GET" else httpx.Response(status, text="somebody else by now")

    network = Network("http://gateway.example", "http://10.0.0.7:40123", listener)
    await network.push(tensors)
    assert not any("authorization" in headers for _, headers, _ in network.seen)


@pytest.mark.parametrize("plain", [False, True], ids=["httpx", "plain"])
@pytest.mark.parametrize("refused", [VersionConflict("pushed again"), QuantizationError("w[0] is nan")], ids=repr)
async def test_weights_that_the_ingest_refuses_are_not_sent_again(service, direct, tensors, caplog, refused, plain):
    service.upload_url = direct.url
    direct.answers["PUT", "/v1/weights/5/parts/0"].append(refused)
    transport = None if plain else httpx.AsyncHTTPTransport()
    async with RolloutClient(service.url, transport=transport) as client:
        with pytest.raises(type(refused), match=re.escape(refused.message)):
            await client.push_weights(5, tensors, parallel_parts=1)
    assert service.parts_sent() == [] and "takes nothing any more" not in caplog.text


async def test_an_address_that_takes_no_connection_is_tried_once(service, tensors, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        service.upload_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with RolloutClient(service.url, retries=0) as client:
        await client.push_weights(5, tensors)
        await client.push_weights(6, tensors)
    assert service.uploads[5].stream == service.uploads[6].stream == stream_of(tensors)
    assert caplog.text.count("not directly to") == 1


async def test_a_listener_that_failed_is_asked_again_later(tensors, caplog, monkeypatch):
    prove, asked = proof("key"), 0

    def listener(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        if request.method == "GET":
            asked += 1
            if asked == 1:
                raise httpx.ReadTimeout("", request=request)
            return prove(request)
        return httpx.Response(404, text="what it takes is of no matter here")

    network = Network("http://gateway.example", "http://10.0.0.7:40123", listener)
    await network.push(tensors)
    assert asked == 1  # in two pushes
    assert "; it is asked again after 60 s" in caplog.text
    assert "not directly to http://10.0.0.7:40123: ReadTimeout: GET http://10.0.0.7:40123/v1/weights" in caplog.text
    monkeypatch.setattr(_part_sender, "RETRY_S", 0.0)
    asked = 0
    await network.push(tensors)
    assert asked == 2
