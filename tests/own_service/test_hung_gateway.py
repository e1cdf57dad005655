"""A gateway that hangs while an engine has calls of it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil

from rollout_service.client import RolloutClient
from rollout_service.protocol.rollout import Rollout
from tests.support.own_service import own_service
from tests.support.processes import descendants

ROLLOUTS, ASKED = 12, 4

T = TypeVar("T")


async def first_of(ask: Callable[[], Awaitable[T]]) -> T:
    """Send ``ASKED`` requests and return the first reply: those that the proxy sends to the hung gateway get none."""
    asked = [asyncio.ensure_future(ask()) for _ in range(ASKED)]
    try:
        answered, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return answered.pop().result()
    finally:
        for each in asked:
            each.cancel()


async def test_a_hung_gateway_stops_no_calls_of_others(tmp_path: Path):
    overrides = {
        "model": {"path": str(tmp_path / "tiny-qwen3")},
        "scaling": {"gateways": 2},
        "weights": {"root": str(tmp_path / "log"), "poll_s": 1.0},
    }
    async with own_service(overrides) as (url, _), RolloutClient(url, retries=0) as client:

        async def generate(max_tokens: int) -> Rollout:
            return await client.generate([5, 6, 7], max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

        async def running() -> int:
            return sum(replica.running for replica in (await first_of(client.fleet)).replicas)

        hung = descendants("ray::ServeReplica:rollout:gateway")[0]
        rollouts = [asyncio.create_task(generate(256)) for _ in range(ROLLOUTS)]
        while await running() < ROLLOUTS // 2:
            await asyncio.sleep(0.1)
        hung.send_signal(signal.SIGSTOP)
        try:
            await asyncio.wait(rollouts, return_when=asyncio.FIRST_COMPLETED)
            while await running():
                await asyncio.sleep(0.1)
            # the engine has ended all calls, and the hung gateway has confirmed none of its own
            assert not all(rollout.done() for rollout in rollouts)
            for _ in range(3):
                await first_of(lambda: generate(1))
            assert hung.status() == psutil.STATUS_STOPPED, "Serve has replaced it, so it no longer matters"
        finally:
            for rollout in rollouts:
                rollout.cancel()
            hung.send_signal(signal.SIGCONT)
