"""vLLM's sleep routes, as its clients call them."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import httpx
import pytest

from rollout_service.gateway.dependencies import Services
from rollout_service.protocol.fleet import PauseMode, SleepTag
from tests.unit.gateway.fakes import http_to


@dataclass
class Ingest:
    """Notes what is asked of the fleet."""

    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def sleep(self, mode: PauseMode, timeout_s: float) -> None:
        self.asked.append(("sleep", mode, timeout_s))

    async def wake_up(self, tags: Collection[SleepTag], timeout_s: float) -> bool:
        self.asked.append(("wake up", tags, timeout_s))
        return "kv_cache" in tags

    async def is_sleeping(self) -> bool:
        return bool(self.asked)


def sleeping(services: Services, ingest: Ingest, may_sleep: bool = True) -> httpx.AsyncClient:
    return http_to(replace(services, ingest=ingest, may_sleep=may_sleep))


async def test_vllm_s_replies(services):
    async with sleeping(services, ingest := Ingest()) as http:
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
    async with sleeping(services, ingest := Ingest()) as http:
        reply = await http.post(route)
    assert reply.status_code == 422 and says in reply.json()["error"]["message"] and ingest.asked == []


@pytest.mark.parametrize("route", ["/sleep?level=2", "/wake_up"])
async def test_a_service_whose_engines_cannot_sleep_says_so(services, route):
    async with sleeping(services, ingest := Ingest(), may_sleep=False) as http:
        reply = await http.post(route)
    assert reply.status_code == 422 and "engine.enable_sleep_mode" in reply.json()["error"]["message"]
    assert ingest.asked == []
