"""Calls of a deployment: its errors come as they are, and Ray's become ours."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from rollout_service.errors import DeploymentFailed, EngineFailed, LogCorrupt, NotFound, NotReady, RolloutServiceError
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime.placements import Ledger, Placements
from rollout_service.runtime.rpc import EngineClient, ingest_client
from tests.support.handles import FakeMethod

CALL = GenerateCall(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling())


class TestClient:
    async def test_answers_as_the_deployment_does(self):
        assert await ingest_client(Answering()).status(7) == await ingest_client(Answering()).status(version=7) == 7

    @pytest.mark.parametrize("error", [NotFound("gone", {"version": 7}), NotReady("soon"), LogCorrupt("torn")])
    async def test_raises_our_errors_as_they_were(self, error):
        with pytest.raises(RolloutServiceError) as raised:
            await ingest_client(Refusing(RayTaskError("status", "", error).as_instanceof_cause())).status(1)
        assert type(raised.value) is type(error)
        assert (raised.value.message, raised.value.detail) == (error.message, error.detail)

    @pytest.mark.parametrize(
        ("error", "told", "why"),
        [
            (
                RayTaskError("status", "", OSError("disk on fire")),
                DeploymentFailed,
                r"the ingest failed with .*on fire",
            ),
            (ActorDiedError(), NotReady, "the ingest died with this call: send it again"),
            (DeploymentUnavailableError("ingest"), NotReady, "no replica of the ingest can be started"),
            (BackPressureError(num_queued_requests=5, max_queued_requests=5), NotReady, "did not take this call"),
        ],
        ids=["a bug", "it died", "Serve cannot start it", "Serve's queue is full"],
    )
    async def test_errors_of_ray_become_ours(self, error, told, why):
        with pytest.raises(told, match=why) as raised:
            await ingest_client(Refusing(error)).status(1)
        assert type(raised.value) is told and raised.value.__cause__ is error

    async def test_a_mistake_of_ours_is_raised_as_it_is(self):
        with pytest.raises(AttributeError, match="mispelt"):
            await ingest_client(Answering()).mispelt()


class TestEngineClient:
    async def test_a_replica_that_died_has_lost_the_call(self):
        with pytest.raises(EngineFailed, match="the replica died with this call") as lost:
            await EngineClient(Refusing(ActorDiedError())).generate(CALL)
        assert lost.value.detail == {}

    async def test_cancelling_a_call_cancels_it_there(self):
        handle = Endless()
        call = asyncio.create_task(EngineClient(handle).generate(CALL))
        await handle.asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert handle.cancelled

    async def test_a_call_is_in_the_ledgers_from_its_choice_to_its_end(self):
        ledger, placements = Ledger(), Placements()
        placements.add_ledger(ledger)
        handle, call_id = Endless(), (CALL.origin, CALL.number)
        ledger.choose(call_id, "chosen first", 1, None, 0.0)
        call = asyncio.create_task(EngineClient(handle, placements).generate(CALL))
        await handle.asked.wait()
        assert (ledger.load("chosen first"), ledger.load("a")) == (0, 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ledger.load("a") == 0


class Answering(FakeMethod):
    """A handle whose only method answers with what it is given."""

    def __init__(self) -> None:
        self.status = self

    async def remote(self, version: int) -> int:
        return version


class Refusing(FakeMethod):
    """A handle whose every call fails before it reaches a deployment."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.status = self.generate = self

    async def remote(self, *_: object) -> None:
        raise self._error


class Endless(FakeMethod):
    """A handle, and the response of its only method, which never comes."""

    def __init__(self) -> None:
        self.generate, self.asked, self.cancelled = self, asyncio.Event(), False

    def remote(self, call: GenerateCall) -> "Endless":
        return self

    def __await__(self) -> Any:
        self.asked.set()
        return asyncio.Event().wait().__await__()

    def cancel(self) -> None:
        self.cancelled = True
