"""What a replica holds while a request waits for a weight version."""

import asyncio
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapters import ReplicaAdapters
from rollout_service.engine.admission import AdmissionLimit
from rollout_service.engine.handover import HandOver
from rollout_service.engine.load_statistics import SchedulerLog
from rollout_service.engine.progress_reports import ProgressReports
from rollout_service.engine.replica import EngineReplica
from rollout_service.engine.served_labels import ServedLabels
from rollout_service.engine.session_admission import SessionAdmission
from rollout_service.errors import TooEarly
from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime.drain import Drain
from rollout_service.store.adapters import AdapterStore


class WaitingWeightSync:
    """Serves version 1; who asks for a newer one waits until the test lets go."""

    version, returns = 1, 0

    def __init__(self) -> None:
        self.waiting, self.let_go = asyncio.Event(), asyncio.Event()
        self.labels = ServedLabels()

    async def wait_version(self, version: int, timeout_s: float, *, exact: bool = False) -> bool:
        if version > self.version:
            self.waiting.set()
            await self.let_go.wait()
        return version == self.version if exact else version <= self.version


class Engine:
    """Makes one token for each completion."""

    broken = None

    async def generate(
        self, request_id: str, prompt: tuple[int, ...], sampling: Sampling, *others: object
    ) -> tuple[Completion, ...]:
        made = {"token_ids": (1,), "logprobs": (-1.0,), "finish_reason": "length"}
        spans = (Span(version=1, start=0, end=1),)
        return tuple(Completion(index=index, spans=spans, **made) for index in range(sampling.n))


class Batch:
    """Takes what is measured."""

    def add(self, rollout: Rollout) -> None:
        pass


class Replica(EngineReplica):
    """Made of parts by a test, which leaves nothing to be stopped."""

    def __init__(self, weight_sync: WaitingWeightSync) -> None:
        self._config, self._replica_id, self._weight_sync = ServiceConfig(), "r1", weight_sync
        self._admission, self._engine, self._batch = AdmissionLimit(4), Engine(), Batch()
        self._sessions = SessionAdmission(1000, SchedulerLog())
        self._progress = ProgressReports(lambda *_: [])
        self._adapters = ReplicaAdapters(Engine(), AdapterStore(Path("log")), 0, lambda: None)
        self._drain = Drain(30.0)
        self._hand_over = HandOver(self._drain, self._admission, self._alone)

    async def _alone(self) -> bool:
        return False

    def __del__(self) -> None:
        pass


def call(name: str, version: int | None = None) -> GenerateCall:
    sampling = Sampling(n=4, max_tokens=1)
    return GenerateCall(request_id=name, prompt_token_ids=(5,), sampling=sampling, min_weight_version=version)


async def test_requests_for_a_version_that_never_comes_hold_no_place():
    weight_sync = WaitingWeightSync()
    replica = Replica(weight_sync)
    waiting = [asyncio.create_task(replica.generate(call(f"early-{i}", version=99))) for i in range(8)]
    await asyncio.wait_for(weight_sync.waiting.wait(), 30)
    assert len((await replica.generate(call("any"))).completions) == 4
    assert len((await replica.generate(call("this", version=1))).completions) == 4
    weight_sync.let_go.set()
    for refused in waiting:
        with pytest.raises(TooEarly, match="behind min_weight_version=99"):
            await refused
    assert replica._admission.running == 0


async def test_call_for_another_exact_version_is_refused_by_name():
    asked = call("exact").model_copy(update={"exact_weight_version": 0})
    with pytest.raises(TooEarly, match="serves version 1, not exact_version=0") as refused:
        await Replica(WaitingWeightSync()).generate(asked)
    assert refused.value.detail == {"wanted_version": 0, "live_version": 1, "replica_id": "r1"}
