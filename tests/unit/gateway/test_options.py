"""Session, priority and what to do with aborted completions, on both data routes."""

from dataclasses import replace

import httpx
import pytest

from rollout_service.errors import InvalidRequest
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.generate import RolloutOptions
from tests.unit.gateway.fakes import EchoEngine, LabelIngest, http_to

ROUTES = {"/inference/v1/generate": {"token_ids": [5, 6]}, "/v1/completions": {"prompt": [5, 6]}}


async def post(services: Services, path: str, header: str | None = None, **fields: object) -> httpx.Response:
    headers = {} if header is None else {"X-Session-Id": header}
    async with http_to(services) as http:
        return await http.post(path, json={**ROUTES[path], **fields}, headers=headers)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_session_may_be_named_in_the_body_or_in_a_header(
    services: Services, engine: EchoEngine, path: str
) -> None:
    await post(services, path, session_id="s1")
    await post(services, path, header="s2")
    await post(services, path, header="s3", session_id="s3")
    await post(services, path)
    assert [call.session_id for call in engine.calls] == ["s1", "s2", "s3", None]


@pytest.mark.parametrize("path", ROUTES)
async def test_two_sessions_for_one_request_are_refused(services: Services, engine: EchoEngine, path: str) -> None:
    reply = await post(services, path, header="a", session_id="b")
    assert reply.status_code == 422 and "session_id='b'" in reply.json()["error"]["message"]
    assert engine.calls == []


@pytest.mark.parametrize("path", ROUTES)
async def test_priority_is_handed_on_and_attempts_come_back(services: Services, engine: EchoEngine, path: str) -> None:
    reply = await post(services, path, priority=-3)
    assert reply.json()["attempts"] == 1
    assert engine.calls[0].priority == -3


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [("session_id", ""), ("session_id", "x" * 257), ("priority", 2**31), ("priority", "high"), ("on_abort", "drop")],
)
async def test_what_is_out_of_range_is_refused_by_name(
    services: Services, path: str, field: str, value: object
) -> None:
    reply = await post(services, path, **{field: value})
    assert reply.status_code == 422 and field in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("asked", "version"), [(3, 3), ("3", 3), ("run-7/step-300", 12)])
async def test_a_version_is_asked_for_by_number_or_label(
    services: Services, engine: EchoEngine, path: str, asked: int | str, version: int
) -> None:
    services = replace(services, ingest=LabelIngest({"run-7/step-300": 12}))
    assert (await post(services, path, min_weight_version=asked)).status_code == 200
    assert engine.calls[0].min_weight_version == version


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("asked", "status"), [("run-7/step-9", 404), ("next", 422), ("a b", 422), ("-3", 422), ("x" * 129, 422), (-1, 422)]
)
async def test_a_version_that_there_is_not_is_refused(
    services: Services, engine: EchoEngine, path: str, asked: int | str, status: int
) -> None:
    reply = await post(replace(services, ingest=LabelIngest({})), path, min_weight_version=asked)
    assert reply.status_code == status and engine.calls == []


async def test_a_session_in_a_header_that_is_too_long_is_refused(services: Services) -> None:
    assert (await post(services, "/v1/completions", header="x" * 257)).status_code == 422


def test_options_are_those_fields_alone() -> None:
    given = RolloutOptions(request_id="r", min_weight_version=3, session_id="s", priority=1, on_abort="return")
    assert given.options(None) == given
    with pytest.raises(InvalidRequest):
        given.options("t")
