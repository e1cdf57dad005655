"""A replica made of parts: what it holds while a request waits for a version, and how it ends."""

import asyncio
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapters import ReplicaAdapters
from rollout_service.engine.admission import AdmissionLimit, SessionAdmission
from rollout_service.engine.handover import HandOver
from rollout_service.engine.load_statistics import SchedulerLog
from rollout_service.engine.progress_reports import ProgressReports
from rollout_service.engine.replica import EngineReplica
from rollout_service.engine.replica_state import Pausing, ServedLabels
from rollout_service.errors import EngineFailed, TooEarly
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime import drain
from rollout_service.runtime.drain import Drain
from rollout_service.store.adapters import AdapterStore
from tests.unit.fleet.completions import completion_of


class Ended(BaseException):
    """The process has ended."""


class Engine:
    """Makes one token for each completion, until its process is dead."""

    broken = None
    dead = stopped = False

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], sampling: Sampling, *others: object
    ) -> tuple[Completion, ...]:
        return tuple(completion_of((1,), index=index, end="length") for index in range(sampling.n))

    async def check_health(self) -> None:
        if self.dead:
            raise EngineFailed("the engine's process is dead")

    def shutdown(self) -> None:
        self.stopped = True


class WeightSync:
    """Serves version 1; who asks for a newer one waits until the test lets go."""

    version, left = 1, False

    def __init__(self) -> None:
        self.waiting, self.let_go = asyncio.Event(), asyncio.Event()
        self.labels, self.pausing = ServedLabels(), Pausing(Engine(), lambda: None)

    async def wait_version(self, version: int, timeout_s: float, *, exact: bool = False) -> bool:
        if version > self.version:
            self.waiting.set()
            await self.let_go.wait()
        return version == self.version if exact else version <= self.version

    async def caught_up(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    async def leave(self) -> None:
        self.left = True


class Replica(EngineReplica):
    """Made of parts by a test, which leaves nothing to be stopped."""

    def __init__(self, routed: bool = True) -> None:
        self._config, self._replica_id, self._routed = ServiceConfig(), "r1", routed
        self._weight_sync, self._engine = WeightSync(), Engine()
        self._admission, self._sessions = AdmissionLimit(4), SessionAdmission(1000, SchedulerLog())
        self._progress = ProgressReports(lambda *_: [])
        self._adapters = ReplicaAdapters(Engine(), AdapterStore(Path("log")), 0, lambda: None)
        self._drain = Drain(30.0)
        self._hand_over = HandOver(self._drain, self._admission, self._others_serve)


def call(name: str, version: int | None = None) -> GenerateCall:
    sampling = Sampling(n=4, max_tokens=1)
    return GenerateCall(request_id=name, prompt_token_ids=(5,), sampling=sampling, min_weight_version=version)


@pytest.fixture(autouse=True)
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(drain.os, "_exit", end)


async def test_requests_for_a_version_that_never_comes_hold_no_place():
    replica = Replica()
    waiting = [asyncio.create_task(replica.generate(call(f"early-{i}", version=99))) for i in range(8)]
    await asyncio.wait_for(replica._weight_sync.waiting.wait(), 30)
    assert len((await replica.generate(call("any"))).completions) == 4
    assert len((await replica.generate(call("this", version=1))).completions) == 4
    replica._weight_sync.let_go.set()
    for refused in waiting:
        with pytest.raises(TooEarly, match="behind min_weight_version=99"):
            await refused
    assert replica._admission.running == 0


async def test_call_for_another_exact_version_is_refused_by_name():
    asked = call("exact").model_copy(update={"exact_weight_version": 0})
    with pytest.raises(TooEarly, match="serves version 1, not exact_version=0") as refused:
        await Replica().generate(asked)
    assert refused.value.detail == {"wanted_version": 0, "live_version": 1, "replica_id": "r1"}


@pytest.mark.parametrize("routed", [True, False])
async def test_a_replica_ends_when_its_engine_is_dead_but_says_why_if_it_does_not_serve_yet(routed):
    replica = Replica(routed)
    await replica.check_health()
    replica._engine.dead = True
    if not routed:
        with pytest.raises(EngineFailed, match="process is dead"):
            await replica.check_health()
        return
    with pytest.raises(Ended, match="1"):
        await replica.check_health()
    assert replica._weight_sync.left and replica._engine.stopped
