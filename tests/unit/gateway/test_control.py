"""The control routes: ``/health`` and ``/v1/fleet`` say why nothing can be served, and vLLM's sleep routes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from rollout_service.errors import NotReady
from rollout_service.fleet.serve_status import ServeMessages
from rollout_service.gateway import dependencies
from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.fleet import FailedStart, FailedStarts, Fleet, PauseMode, ReplicaStatus, SleepTag
from tests.unit.gateway.fakes import Silent, http_to

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
    async with http_to(replace(services, ingest=ingest, serve_messages=ServeMessages(not_running))) as http:
        reply = await http.get(path)
    return reply.status_code, reply.json()


async def test_a_live_replica_or_one_that_was_asked_to_sleep_is_enough(services):
    assert await health(services, Ingest(fleet(LIVE))) == (200, {"status": "ok"})
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
    monkeypatch.setattr(dependencies, "INGEST_ANSWERS_S", 0.01)
    status, body = await health(services, Silent(), lambda: {"ingest": "the disk is full"}, path)
    assert (status, body["error"]["detail"]) == (503, {"not_running": {"ingest": "the disk is full"}})


@dataclass
class Sleeper:
    """Notes what is asked of the fleet."""

    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def sleep(self, mode: PauseMode, timeout_s: float) -> None:
        self.asked.append(("sleep", mode, timeout_s))

    async def wake_up(self, tags: Collection[SleepTag], timeout_s: float) -> bool:
        self.asked.append(("wake up", tags, timeout_s))
        return "kv_cache" in tags

    async def is_sleeping(self) -> bool:
        return bool(self.asked)


def sleeping(services: Services, ingest: Sleeper, may_sleep: bool = True) -> httpx.AsyncClient:
    return http_to(replace(services, ingest=ingest, may_sleep=may_sleep))


async def test_vllm_s_replies(services):
    async with sleeping(services, ingest := Sleeper()) as http:
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post("/sleep")).json() == {"status": "sleeping", "level": 1}
        assert (await http.post("/sleep?level=2&mode=keep&timeout_s=5")).json() == {"status": "sleeping", "level": 2}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await http.post("/wake_up?tags=weights")).json() == {"status": "sleeping", "tags": ["weights"]}
        reply = await http.post("/wake_up?tags=weights&tags=kv_cache")
        assert reply.json() == {"status": "awake", "tags": ["weights", "kv_cache"]}
        assert (await http.post("/wake_up")).json() == {"status": "awake", "tags": None}
    assert ingest.asked == [
        ("sleep", "abort", 600.0),
        ("sleep", "keep", 5.0),
        ("wake up", ("weights",), 600.0),
        ("wake up", ("weights", "kv_cache"), 600.0),
        ("wake up", ("weights", "kv_cache"), 600.0),
    ]


async def test_sglang_s_memory_routes_sleep_and_wake(services):
    """As AReaL 1.0.4, slime and miles call them, and parse the reply; SGLang has a third tag, for CUDA graphs."""
    async with sleeping(services, ingest := Sleeper()) as http:
        bodies = [("release", {}), ("resume", {}), ("resume", {"tags": ["weights"]}), ("resume", {"tags": None})]
        bodies += [("resume", {"tags": ["kv_cache", "cuda_graph"]}), ("resume", {"tags": ["cuda_graph"]})]
        bodies += [("release", {"tags": ["kv_cache", "weights", "cuda_graph"]})]
        for verb, body in bodies:
            reply = await http.post(f"/{verb}_memory_occupation", json=body)
            assert (reply.status_code, reply.json()) == (200, None)
        reply = await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        assert reply.status_code == 400 and "free weights and kv_cache together" in reply.json()["message"]
    asleep, awake = ("sleep", "abort", 600.0), ("wake up", ("weights", "kv_cache"), 600.0)
    assert ingest.asked == [
        *(asleep, awake, ("wake up", ("weights",), 600.0), awake),
        *(("wake up", ("kv_cache",), 600.0), asleep),
    ]


@pytest.mark.parametrize(
    ("route", "says"),
    [
        ("/sleep?level=0", "POST /pause"),
        ("/sleep?level=3", "level"),
        ("/sleep?mode=later", "mode"),
        ("/wake_up?tags=scheduling", "tags"),
    ],
)
async def test_what_is_not_implemented_is_refused_by_name(services, route, says):
    async with sleeping(services, ingest := Sleeper()) as http:
        reply = await http.post(route)
    assert reply.status_code == 422 and says in reply.json()["error"]["message"] and ingest.asked == []


@pytest.mark.parametrize("route", ["/sleep?level=2", "/wake_up"])
async def test_a_service_whose_engines_cannot_sleep_says_so(services, route):
    async with sleeping(services, ingest := Sleeper(), may_sleep=False) as http:
        reply = await http.post(route)
    assert reply.status_code == 422 and "engine.enable_sleep_mode" in reply.json()["error"]["message"]
    assert ingest.asked == []
