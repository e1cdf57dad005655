"""``GET /metrics`` asks the ingest, and answers everyone."""

from dataclasses import replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollout_service.errors import NotReady
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from rollout_service.protocol.mismatch import MismatchTable
from rollout_service.protocol.weights import ServiceState
from rollout_service.web.auth import Authorizer
from tests.unit.gateway.fakes import http_to
from tests.unit.monitor.reports import body, full, span

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


class Service:
    """The ingest and the monitor; without a state, neither answers."""

    def __init__(self, state: ServiceState | None = STATE) -> None:
        self._state = state

    async def state(self) -> ServiceState:
        if self._state is None:
            raise NotReady("version 0 is still being made")
        return self._state

    async def per_replica(self) -> MismatchTable:
        raise NotReady("it died with this call")


def metrics_of(reply: httpx.Response) -> dict[str, float]:
    """Value by name; of several samples of a metric, the last."""
    assert reply.status_code == 200
    return {s.name: s.value for f in text_string_to_metric_families(reply.text) for s in f.samples}


async def get(services: Services, ingest: object) -> httpx.Response:
    """From another machine and without the token."""
    guarded = replace(services, ingest=ingest, authorizer=Authorizer("secret"))
    async with http_to(guarded, "192.0.2.1") as http:
        return await http.get("/metrics")


async def test_it_is_prometheus_text_of_the_ingests_state_and_of_the_mismatch(services):
    await services.monitor.report(body(full([-1.5] * 2, [-1.0] * 2, [span(41, 0, 2)])))
    await services.monitor.report(body(full([-1.0] * 3, [-0.5] * 3, [span(41, 0, 3)]), truncated_sampling=True))
    reply = await get(services, Service())
    found = metrics_of(reply)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found["rollout_latest_version"] == 41 and found["rollout_paused"] == 1
    assert found["rollout_mismatch_k1"] == 0.5 and found["rollout_mismatch_truncated_tokens_total"] == 3


async def test_truncated_tokens_are_shown_apart(services):
    truncated = full([-1.0] * 3, [-0.5] * 3, [span(41, 0, 3)])
    await services.monitor.report(body(truncated, truncated_sampling=True))
    found = metrics_of(await get(services, Service()))
    assert found["rollout_mismatch_truncated_tokens_total"] == 3
    assert "rollout_mismatch_k1" not in found and "rollout_version_suspect" not in found


async def test_a_monitor_that_is_away_leaves_the_rest_of_the_scrape(services):
    found = metrics_of(await get(replace(services, monitor=Service()), Service()))
    assert found["rollout_latest_version"] == 41 and "rollout_mismatch_k1" not in found


async def test_without_a_state_the_scrape_fails_with_503(services):
    assert (await get(services, Service(None))).status_code == 503
