"""A service with certificates: the client trusts the gateway by a file, and the listener by the gateway's word."""

from pathlib import Path

import httpx
import pytest
import xxhash
from safetensors.torch import load_file

from rollout_service.client import RolloutClient, SyncRolloutClient
from rollout_service.client._tensors import describe
from rollout_service.protocol.upload import PART_DIGEST_HEADER, BeginUpload
from tests.support.certificates import Certificate, make_certificate
from tests.support.models import make_model
from tests.support.serving import serving
from tests.unit.client.conftest import stream_of
from tests.unit.client.real_ingest import real_ingest
from tests.unit.client.service import Service


@pytest.fixture
def gateways(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path / "gateway", "127.0.0.1")


@pytest.fixture
def listeners(tmp_path: Path) -> Certificate:
    """For another name than the one that it is reached by."""
    return make_certificate(tmp_path / "listener", "ingest.example")


async def test_a_service_that_is_not_trusted_is_given_up_at_once(gateways, tensors):
    async with serving(Service(), gateways) as service, RolloutClient(service.url) as client:
        with pytest.raises(httpx.ConnectError) as refused:
            await client.push_weights(5, tensors)
    message = str(refused.value)
    assert "self-signed certificate" in message and "give ca_file" in message
    assert service.log == []


def test_a_file_that_is_not_there_is_refused_when_the_client_is_made(tmp_path):
    for kind in (RolloutClient, SyncRolloutClient):
        with pytest.raises(ValueError, match=r"missing\.pem' is no file of certificates"):
            kind("https://rollouts.example", ca_file=tmp_path / "missing.pem")


async def test_parts_go_directly_to_a_listener_with_the_certificate_told(gateways, listeners, tensors):
    async with serving(Service(), gateways) as service, serving(Service(), listeners) as direct:
        direct.uploads, service.upload_url, service.upload_certificate = service.uploads, direct.url, listeners.pem
        async with RolloutClient(service.url, ca_file=gateways.certfile) as client:
            await client.push_weights(5, tensors)
            await client.push_weights(6, tensors)
    assert sorted(direct.parts_sent()) == sorted([*range(10)] * 2) and service.parts_sent() == []


@pytest.mark.parametrize("told", ["another", "none", "no certificate"])
async def test_parts_do_not_go_to_a_listener_with_another_certificate(told, gateways, listeners, tensors, caplog):
    async with serving(Service(), gateways) as service, serving(Service(), listeners) as direct:
        service.upload_url = direct.url
        service.upload_certificate = {"another": gateways.pem, "none": None, "no certificate": "told"}[told]
        async with RolloutClient(service.url, ca_file=gateways.certfile) as client:
            await client.push_weights(5, tensors)
    assert direct.log == [] and service.uploads[5].stream == stream_of(tensors)
    assert f"weights go through {service.url}, not directly to {direct.url}" in caplog.text


async def test_the_real_ingest_takes_parts_with_tls_from_both(gateways, tmp_path, caplog):
    model = make_model(tmp_path / "qwen2", "qwen2")
    tensors = load_file(model / "model.safetensors")
    async with real_ingest(model, tmp_path / "log", certificate=gateways) as service:
        async with RolloutClient(service.url, ca_file=gateways.certfile) as client:
            assert (await client.push_weights(1, tensors, wait="none")).state == "committed"
            assert "not directly" not in caplog.text and service.url.startswith("https://")
        # and a trainer that knows the gateway alone, as any other program does
        begin = BeginUpload(version=2, tensors=tuple(describe(name, tensor) for name, tensor in tensors.items()))
        plan = await service.ingest.begin(begin)
        data = stream_of(tensors)[: plan.part_bytes]
        async with httpx.AsyncClient(verify=str(gateways.certfile), timeout=None) as http:
            digest = {PART_DIGEST_HEADER: xxhash.xxh3_128_hexdigest(data)}
            reply = await http.put(f"{service.url}/v1/weights/2/parts/0", content=data, headers=digest)
        assert reply.status_code == 200, reply.text
