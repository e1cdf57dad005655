"""``GET /metrics`` asks the ingest, and answers everyone."""

from dataclasses import replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollout_service.errors import NotReady
from rollout_service.gateway.replica import create_app
from rollout_service.gateway.services import Services
from rollout_service.metrics.state import ServiceState
from rollout_service.types import Fleet, MismatchTable, ReplicaStatus
from rollout_service.web.auth import Authorizer
from tests.support.without_ray import LocalHandle

STATE = ServiceState(
    at=10.0,
    fleet=Fleet(latest_version=41, paused=True, replicas=(ReplicaStatus(replica_id="r1", version=41, state="ready"),)),
    versions=(),
    committed_at={41: 5.0},
    replicas_min=0,
    replicas_max=2,
    replica_starts=0,
    replica_failures=0,
    log_bytes=1,
    log_free_bytes=2,
)


class Ingest:
    """Knows the state."""

    async def state(self) -> ServiceState:
        return STATE


class StartingIngest:
    """Knows none yet."""

    async def state(self) -> ServiceState:
        raise NotReady("version 0 is still being made")


async def get(services: Services, ingest: object) -> httpx.Response:
    """From another machine and without the token."""
    guarded = replace(services, ingest=LocalHandle(ingest), authorizer=Authorizer("secret"))
    transport = httpx.ASGITransport(create_app(guarded), client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.get("/metrics")


async def test_it_is_prometheus_text_of_the_ingests_state(services: Services) -> None:
    reply = await get(services, Ingest())
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {s.name: s.value for f in text_string_to_metric_families(reply.text) for s in f.samples}
    assert found["rollout_latest_version"] == 41 and found["rollout_paused"] == 1


async def test_without_a_state_the_scrape_fails_rather_than_showing_an_old_one(services: Services) -> None:
    assert (await get(services, StartingIngest())).status_code == 503


class Away:
    """A monitor that died."""

    async def table(self, *which: object) -> MismatchTable:
        raise NotReady("the monitor died")


async def test_the_mismatch_is_shown_while_the_monitor_answers_and_all_else_without_it(services: Services) -> None:
    await services.monitor.observe.remote("trainer", 41, "r1", [[-1.0, -2.0]], [[-1.1, -2.1]])
    measured = await get(services, Ingest())
    alone = await get(replace(services, monitor=LocalHandle(Away())), Ingest())
    assert 'rollout_mismatch_tokens_total{replica="r1",source="trainer",version="41"} 2.0' in measured.text
    assert "rollout_mismatch_tokens_total{" not in alone.text and "rollout_latest_version 41.0" in alone.text
