"""Calls of a deployment, through Ray itself: its errors come as they are, and Ray's become ours."""

import asyncio
from typing import Any

import pytest
import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from rollout_service.errors import DeploymentFailed, EngineFailed, LogCorrupt, NotFound, NotReady, RolloutServiceError
from rollout_service.fleet.routing import Ledger
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime.placements import Placements
from rollout_service.runtime.rpc import EngineClient, ingest_client
from tests.support.handles import ActorHandle, FakeMethod

CALL = GenerateCall(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling())


@pytest.fixture
def actor(object_store: None) -> Any:
    """Answers with what it is given, or raises it."""

    @ray.remote(num_cpus=0)
    class Deployment:
        async def status(self, version: object) -> object:
            if isinstance(version, Exception):
                raise version
            return version

    return ActorHandle(Deployment.remote())


class TestClient:
    async def test_answers_as_the_deployment_does(self, actor):
        assert await ingest_client(actor).status(7) == await ingest_client(actor).status(version=7) == 7

    @pytest.mark.parametrize("error", [NotFound("gone", {"version": 7}), NotReady("soon"), LogCorrupt("torn")])
    async def test_raises_our_errors_as_they_were(self, actor, error):
        with pytest.raises(RolloutServiceError) as raised:
            await ingest_client(actor).status(error)
        assert type(raised.value) is type(error)
        assert (raised.value.message, raised.value.detail) == (error.message, error.detail)

    async def test_tells_any_other_error(self, actor):
        with pytest.raises(DeploymentFailed, match=r"the ingest failed with .*disk on fire") as raised:
            await ingest_client(actor).status(OSError("disk on fire"))
        assert raised.value.http_status == 500 and raised.value.__cause__ is not None

    async def test_a_deployment_that_died_is_not_ready(self, actor):
        ray.kill(actor.actor)
        with pytest.raises(NotReady, match="the ingest died with this call: send it again"):
            await ingest_client(actor).status(1)

    @pytest.mark.parametrize(
        ("error", "why"),
        [
            (DeploymentUnavailableError("ingest"), "no replica of the ingest can be started"),
            (BackPressureError(num_queued_requests=5, max_queued_requests=5), "did not take this call"),
        ],
        ids=["Serve cannot start it", "Serve's queue is full"],
    )
    async def test_what_serve_refuses_is_not_ready(self, error, why):
        with pytest.raises(NotReady, match=why):
            await ingest_client(Refusing(error)).status(1)

    async def test_a_mistake_of_ours_is_raised_as_it_is(self, actor):
        with pytest.raises(AttributeError, match="mispelt"):
            await ingest_client(actor).mispelt()


class TestEngineClient:
    async def test_a_replica_that_died_has_lost_the_call(self):
        with pytest.raises(EngineFailed, match="the replica died with this call") as lost:
            await EngineClient(Refusing(ray.exceptions.ActorDiedError())).generate(CALL)
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
