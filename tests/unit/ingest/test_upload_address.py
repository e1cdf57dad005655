"""Which trainer is told which address of the upload listener, and who may use it."""

import socket

import httpx
import pytest
import xxhash

from rollout_service.errors import RolloutServiceError
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.protocol.upload import PART_DIGEST_HEADER, UPLOAD_KEY_HEADER, listener_proof
from tests.unit.ingest.trainer import Trainer, begin_of, parts_of

ELSEWHERE = "203.0.113.9"
"""An address for documentation: no machine has it."""
NONCE = "0123456789abcdef"


def own_address() -> str:
    """One of this machine's, not loopback if it has another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has loopback only")
        return str(probe.getsockname()[0])


def told(host: str, reached: str | None) -> str | None:
    listener = UploadAddress(host, 7000, node_ip="10.1.2.3", node_id="head").announced(1, reached)
    return None if listener is None else listener.url


@pytest.mark.parametrize(
    ("host", "reached", "url"),
    [
        ("127.0.0.1", "127.0.0.1", "http://127.0.0.1:7000"),
        ("127.0.0.1", "::1", "http://127.0.0.1:7000"),
        ("::1", "127.0.0.1", "http://[::1]:7000"),
        ("localhost", "127.0.0.1", "http://localhost:7000"),
        ("127.0.0.1", ELSEWHERE, None),
        ("127.0.0.1", "testserver", None),
        ("127.0.0.1", None, None),
        ("10.9.9.9", ELSEWHERE, "http://10.9.9.9:7000"),
        ("10.9.9.9", None, "http://10.9.9.9:7000"),
        ("0.0.0.0", "127.0.0.1", "http://10.1.2.3:7000"),
        ("0.0.0.0", ELSEWHERE, "http://10.1.2.3:7000"),
        ("::", ELSEWHERE, "http://10.1.2.3:7000"),
        ("0.0.0.0", None, "http://10.1.2.3:7000"),
    ],
)
def test_a_trainer_is_told_an_address_that_it_can_reach_or_none(host, reached, url):
    assert told(host, reached) == url


def test_a_trainer_is_given_the_address_at_which_it_connected():
    reached = own_address()
    assert told("0.0.0.0", reached) == f"http://{reached}:7000"


def test_a_trainer_is_told_the_advertised_address_wherever_it_is():
    for advertised, url in (
        ("rollouts.example", "https://rollouts.example:7000"),
        ("rollouts.example:30443", "https://rollouts.example:30443"),
        ("[fd00:1::7]:30443", "https://[fd00:1::7]:30443"),
    ):
        address = UploadAddress(
            "0.0.0.0", 7000, node_ip="10.1.2.3", node_id="head", advertised=advertised, certificate="PEM"
        )
        for reached in ("127.0.0.1", ELSEWHERE, None):
            listener = address.announced(1, reached)
            assert listener is not None and (listener.url, listener.certificate) == (url, "PEM")
        # gateways need not leave the cluster
        assert address.within(1, "worker").url == "https://10.1.2.3:7000"
        assert address.within(1, "head").url == "https://127.0.0.1:7000"


def test_a_gateway_gets_a_reachable_address_or_a_helpful_error():
    everywhere = UploadAddress("0.0.0.0", 7000, node_ip="10.1.2.3", node_id="head")
    assert everywhere.within(1, "head").url == "http://127.0.0.1:7000"
    assert everywhere.within(1, "worker").url == "http://10.1.2.3:7000"
    loopback = UploadAddress("127.0.0.1", 7000, node_ip="10.1.2.3", node_id="head")
    assert loopback.within(1, "head").url == "http://127.0.0.1:7000"
    with pytest.raises(
        RolloutServiceError, match=r"127\.0\.0\.1 of another node .* set weights\.upload_host to 0\.0\.0\.0"
    ):
        loopback.within(1, "worker")


def test_a_key_is_of_one_version_and_of_one_listener():
    address = UploadAddress("127.0.0.1", 7000)
    assert address.opens(1, address.key(1))
    assert not address.opens(2, address.key(1)) and not address.opens(1, None) and not address.opens(1, "ü")
    assert not UploadAddress("127.0.0.1", 7000).opens(1, address.key(1))
    assert address.proof(1, NONCE) == listener_proof(address.key(1), NONCE) != address.key(1)


async def test_a_part_needs_the_upload_key_of_its_version(ingest, weights):
    ingest.upload_address = UploadAddress("127.0.0.1", 7000)
    remote = Trainer(ingest).http
    plan = await ingest.begin(begin_of(1, weights), "127.0.0.1")
    assert plan.upload_url == "http://127.0.0.1:7000" and plan.upload_key is not None
    data = parts_of(weights)[0]
    digest = {PART_DIGEST_HEADER: xxhash.xxh3_128_hexdigest(data)}

    async def put(headers: dict[str, str | bytes]) -> int:
        return (await remote.put("/v1/weights/1/parts/0", content=data, headers=digest | headers)).status_code

    for key in ("", "ü".encode(), ingest.upload_address.key(2)):
        assert await put({UPLOAD_KEY_HEADER: key}) == 401
    assert (await ingest.status(1)).missing_parts == plan.missing_parts
    assert await put({UPLOAD_KEY_HEADER: plan.upload_key}) == 200


async def test_the_listener_proves_its_key_without_revealing_it(ingest):
    ingest.upload_address = UploadAddress("127.0.0.1", 7000)
    anyone: httpx.AsyncClient = Trainer(ingest).http
    reply = await anyone.get("/v1/weights/1/listener", params={"nonce": NONCE})
    assert reply.json() == {"proof": listener_proof(ingest.upload_address.key(1), NONCE)}
    for nonce in ("", "short", "x" * 129):
        assert (await anyone.get("/v1/weights/1/listener", params={"nonce": nonce})).status_code == 422
