"""Rollouts that nobody waits for are made, kept for a while, and no more than fit."""

import asyncio
from dataclasses import dataclass, replace

import httpx
import pytest

from rollout_service.client import RolloutClient
from rollout_service.errors import InvalidRequest, NonFiniteLogprob, NotFound, Overloaded, VersionConflict
from rollout_service.gateway.dependencies import Services
from rollout_service.gateway.deployment import create_app
from rollout_service.gateway.detached import KEPT_S, DetachedRollouts, Reply
from tests.unit.gateway.chats import URL
from tests.unit.gateway.fakes import EchoEngine
from tests.unit.gateway.test_weights import http_to


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


async def reply(text: str = "made") -> Reply:
    return {"said": text}


async def never() -> Reply:
    await asyncio.Event().wait()
    raise AssertionError


async def failing() -> Reply:
    raise NonFiniteLogprob("broken weights", {"position": 3})


async def test_a_rollout_is_kept_until_its_time_is_over() -> None:
    clock = Clock()
    detached = DetachedRollouts(clock)
    first = detached.begin(reply(), 4)
    assert await detached.collect(first, 30) == {"said": "made"}
    clock.now = KEPT_S
    assert await detached.collect(first, 0) == {"said": "made"}
    clock.now = 2 * KEPT_S + 1
    detached.begin(never(), 4, "other")
    with pytest.raises(NotFound, match=first):
        await detached.collect(first, 0)
    clock.now = 9 * KEPT_S
    detached.begin(reply(), 4)
    assert await detached.collect("other", 0) is None
    detached.delete("other")


async def test_what_nobody_collects_is_freed_when_its_time_is_over() -> None:
    """Whether or not anybody begins another one."""
    clock = Clock()
    detached = DetachedRollouts(clock)
    loop, timers = asyncio.get_running_loop(), list[tuple[float, object]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", lambda delay, call: timers.append((delay, call)))
        detached.begin(reply(), 4)
        while not timers:
            await asyncio.sleep(0)
    [(delay, call)] = timers
    clock.now = delay
    assert len(detached) == 1
    call()  # type: ignore[operator]
    assert len(detached) == 0


async def test_its_error_is_that_of_who_collects_it() -> None:
    detached = DetachedRollouts()
    failed = detached.begin(failing(), 4)
    for _ in range(2):
        with pytest.raises(NonFiniteLogprob, match="broken weights"):
            await detached.collect(failed, 30)


async def test_a_deleted_one_ends() -> None:
    detached = DetachedRollouts()
    ended = asyncio.Event()

    async def work() -> Reply:
        try:
            return await never()
        finally:
            ended.set()

    rollout_id = detached.begin(work(), 4)
    collecting = asyncio.create_task(detached.collect(rollout_id, 30))
    await asyncio.sleep(0)
    detached.delete(rollout_id)
    with pytest.raises(NotFound, match="was deleted"):
        await collecting
    assert ended.is_set()
    detached.delete(rollout_id)


async def test_names_and_numbers_are_bounded() -> None:
    detached = DetachedRollouts(most=2, most_tokens=10)
    detached.begin(never(), 4, "mine")
    with pytest.raises(VersionConflict, match="there is a detached rollout mine already"):
        detached.begin(never(), 4, "mine")
    with pytest.raises(Overloaded, match="1 detached rollouts of up to 4 tokens"):
        detached.begin(never(), 7)
    detached.begin(never(), 6, "other")
    with pytest.raises(Overloaded):
        detached.begin(never(), 0)
    detached.delete("mine")
    detached.begin(never(), 4, "mine")
    for name in ("mine", "other"):
        detached.delete(name)


async def test_a_client_collects_what_it_had_asked_for(services: Services, engine: EchoEngine) -> None:
    def client() -> RolloutClient:
        return RolloutClient(URL, transport=httpx.ASGITransport(app=create_app(services)), retries=0)

    async with client() as trainer:
        assert await trainer.detach([5, 6, 7], n=2, request_id="step 3/1") == "step 3/1"
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            await trainer.detach([9999])
        with pytest.raises(VersionConflict):
            await trainer.detach([5], request_id="step 3/1")
    async with client() as restarted:
        rollout = await restarted.collect("step 3/1")
        assert rollout.prompt_token_ids == (5, 6, 7) and [c.token_ids for c in rollout.completions] == [(7, 6, 5)] * 2
        await restarted.discard_rollout("step 3/1")
        with pytest.raises(NotFound, match="step 3/1"):
            await restarted.collect("step 3/1")
    several = replace(services, num_gateways=2)
    async with RolloutClient(URL, transport=httpx.ASGITransport(app=create_app(several))) as trainer:
        with pytest.raises(InvalidRequest, match=r"not implemented with scaling\.gateways=2"):
            await trainer.detach([5])


@pytest.mark.parametrize("asked", [{}, {"logprobs": 1}, {"prompt_logprobs": 1}], ids=str)
async def test_all_that_a_reply_may_hold_counts(services: Services, asked: dict[str, int]) -> None:
    room = 8 + 2 * 4
    body = {"token_ids": [5] * 8, "sampling_params": {"max_tokens": 4, "n": 2, **asked}, "detach": True}
    for most, status in ((room, 503 if asked else 202), (room - 1, 503)):
        detached = DetachedRollouts(most_tokens=most)
        async with http_to(replace(services, detached=detached)) as http:
            reply = await http.post("/inference/v1/generate", json=body)
        assert reply.status_code == status
        if status == 202:
            detached.delete(reply.json()["id"])
