"""The weight routes that only ask."""

from dataclasses import replace

import pytest

from rollout_service.protocol.base import MAX_VERSION
from rollout_service.protocol.experts import ExpertNaming
from rollout_service.protocol.upload import LARGEST_PART_BYTES, TrainerRecipe
from tests.unit.gateway.fakes import http_to

RECIPE = TrainerRecipe(weights="fp8_block", scales="power_of_two", quantized=("a", "b"), experts=ExpertNaming())


class Ingest:
    """Knows its recipe."""

    async def recipe(self) -> TrainerRecipe:
        return RECIPE


async def test_the_recipe_is_no_version(services):
    async with http_to(replace(services, ingest=Ingest())) as http:
        reply = await http.get("/v1/weights/recipe")
        assert reply.status_code == 200
        assert TrainerRecipe.model_validate_json(reply.content) == RECIPE


async def test_a_part_larger_than_any_is_refused_before_it_is_read(services):
    async with http_to(replace(services, ingest=None)) as http:  # it is asked for nothing
        size = {"Content-Length": str(LARGEST_PART_BYTES + 1)}
        reply = await http.put("/v1/weights/1/parts/0", content=b"", headers=size)
        assert reply.status_code == 413 and reply.json()["error"]["detail"] == {"limit_bytes": LARGEST_PART_BYTES}


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 2**63, 10**255])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/weights/{}"),
        ("DELETE", "/v1/weights/{}"),
        ("POST", "/v1/weights/{}/commit"),
        ("PUT", "/v1/weights/{}/parts/0"),
        ("GET", "/v1/mismatch?version={}"),
    ],
)
async def test_a_version_out_of_bounds_is_refused_by_every_route(services, method, path, version):
    async with http_to(services) as http:
        reply = await http.request(method, path.format(version))
    assert reply.status_code == 422 and "version" in reply.json()["error"]["message"]


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 10**255])
async def test_a_request_body_with_a_version_out_of_bounds_is_refused(services, version):
    bodies: dict[str, dict[str, object]] = {
        "/v1/weights": {"version": version, "source": {"path": "/weights"}},
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}, "min_weight_version": version},
        "/v1/completions": {"prompt": [1], "min_weight_version": version},
    }
    async with http_to(services) as http:
        for path, body in bodies.items():
            reply = await http.post(path, json=body)
            assert reply.status_code == 422 and "version" in reply.json()["error"]["message"]
