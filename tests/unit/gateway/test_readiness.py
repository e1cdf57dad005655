"""``GET /health`` and ``/v1/fleet`` say why nothing can be served: what the replica said, else what Serve says."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rollout_service.errors import NotReady
from rollout_service.gateway import control, models, readiness
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.fleet import FailedStart, FailedStarts, Fleet, ReplicaStatus
from rollout_service.web.errors import install_error_handlers

LIVE = ReplicaStatus(replica_id="r9", version=3, state="ready")
STARTING = ReplicaStatus(replica_id="r9", version=None, state="starting")


class Ingest:
    """Answers with a fleet, or raises."""

    def __init__(self, answer: Fleet | Exception) -> None:
        self._answer = answer

    async def fleet(self) -> Fleet:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def fleet(*replicas: ReplicaStatus, tries: int = 0, over: bool = False) -> Fleet:
    starts = [FailedStart(replica_id=f"r{i}", reason=f"OutOfMemory: no. {i}", at=1.0) for i in range(tries)]
    failed = FailedStarts(tries=tries, first=starts[0], last=starts[-1], over=over) if starts else None
    return Fleet(latest_version=3, paused=False, replicas=replicas, failed_starts=failed)


async def health(
    services: Services, ingest: Any, not_running: Callable[[], dict[str, str]] = dict, path: str = "/health"
) -> tuple[int, dict[str, Any]]:
    app = FastAPI()
    app.state.services = replace(services, ingest=ingest, not_running=not_running)
    install_error_handlers(app)
    app.include_router(models.router)
    app.include_router(control.router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        reply = await http.get(path)
    return reply.status_code, reply.json()


async def test_a_live_replica_is_enough(services):
    assert await health(services, Ingest(fleet(LIVE))) == (200, {"status": "ok"})


async def test_engines_that_sleep_are_as_they_were_asked_to_be(services):
    asleep = ReplicaStatus(replica_id="r9", version=None, state="asleep", paused=True)
    assert await health(services, Ingest(fleet(asleep))) == (200, {"status": "ok"})
    cannot_wake = asleep.model_copy(update={"error": "another process has the memory"})
    assert (await health(services, Ingest(fleet(cannot_wake))))[0] == 503


async def test_the_first_reason_is_told_while_replicas_are_tried(services):
    status, body = await health(services, Ingest(fleet(STARTING, tries=2)))
    assert status == 503
    assert body["error"]["type"] == "NotReady"
    said = "no engine replica is live: 2 starts have failed, the first (r0) with: OutOfMemory: no. 0"
    assert body["error"]["message"] == said
    assert body["error"]["detail"]["failed_starts"]["last"]["reason"] == "OutOfMemory: no. 1"


async def test_after_a_success_tries_and_reason_are_still_told(services):
    status, body = await health(services, Ingest(fleet(LIVE, tries=3, over=True)))
    assert (status, body["status"]) == (200, "ok")
    assert (body["failed_starts"]["tries"], body["failed_starts"]["first"]["replica_id"]) == (3, "r0")


@pytest.mark.parametrize("ingest", [Ingest(fleet()), Ingest(NotReady("the ingest died with this request"))])
async def test_where_no_replica_said_anything_serve_is_asked(services, ingest):
    status, body = await health(services, ingest, lambda: {"ingest": "A replica failed to start. LogCorrupt: gone"})
    assert status == 503
    assert "Serve says of ingest: A replica failed to start. LogCorrupt: gone" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/fleet"])
async def test_nobody_waits_for_an_ingest_that_never_answers(services, monkeypatch, path):
    class Silent:
        async def fleet(self) -> Fleet:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(readiness, "INGEST_ANSWERS_S", 0.01)
    status, body = await health(services, Silent(), lambda: {"ingest": "the disk is full"}, path)
    assert (status, body["error"]["detail"]) == (503, {"not_running": {"ingest": "the disk is full"}})
