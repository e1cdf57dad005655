"""A replica that starts is seen while its engine keeps the event loop busy, and waits for its GPU.

A shell script stands in for nvidia-smi.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError

from rollout_service.engine.processes import tell_errors
from rollout_service.engine.startup import GpuTaken, StartupHeartbeat, report_failed_start, wait_for_free_gpus
from rollout_service.errors import NotReady
from rollout_service.protocol.fleet import Fleet, ReplicaStatus
from tests.support.handles import FakeMethod

LONG_S = 30.0


class Ingest(FakeMethod):
    """Keeps reports; handle and method of a Serve deployment in one."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reports: list[ReplicaStatus] = []
        self.enough = threading.Event()

    @property
    def report(self) -> "Ingest":
        return self

    async def remote(self, status: ReplicaStatus) -> None:
        self.reports.append(status)
        if len(self.reports) >= 3:
            self.enough.set()
        if self.failures > 0:
            self.failures -= 1
            raise ActorDiedError()


@pytest.mark.parametrize("failures", [0, 2], ids=["ingest there", "ingest away at first"])
def test_it_reports_from_its_own_thread_until_the_block_ends(failures):
    ingest = Ingest(failures)
    with StartupHeartbeat("r1", ingest, 0.001) as announcement:
        assert ingest.enough.wait(LONG_S)
    announcement._thread.join(LONG_S)
    assert not announcement._thread.is_alive()
    assert {(s.replica_id, s.state, s.version) for s in ingest.reports} == {("r1", "starting", None)}
    sequences = [status.sequence for status in ingest.reports]
    assert sequences == sorted(set(sequences))


def test_it_says_what_it_waits_for_and_what_the_follower_says_once_there_is_one():
    ingest = Ingest()
    heartbeat = StartupHeartbeat("r1", ingest, 0.001)

    def blocked() -> int:
        return Fleet(latest_version=0, paused=False, replicas=(heartbeat.status(),)).blocked_starts

    heartbeat.waits_for("GPU 1: taken")
    assert heartbeat.status().error == "GPU 1: taken" and blocked() == 1
    heartbeat.waits_for(None)
    assert blocked() == 0
    syncing = ReplicaStatus(replica_id="r1", sequence=7, version=None, state="syncing", target=4)
    heartbeat.status = lambda: syncing
    with heartbeat:
        assert ingest.enough.wait(LONG_S)
    assert ingest.reports[-1] == syncing
    heartbeat.start_over()
    assert heartbeat.status().state == "starting"


@pytest.fixture(autouse=True)
def replica_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's, which this process has not."""
    context: Any = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)


@pytest.mark.parametrize("away", [False, True], ids=["ingest there", "ingest away"])
async def test_a_replica_that_cannot_start_reports_why_and_reraises(away, caplog):
    ingest = Ingest(failures=int(away))
    with pytest.raises(ValueError, match="cannot be served"):
        async with report_failed_start(ingest, None):
            raise ValueError("cannot be served") from MemoryError("no memory")
    reason = "ValueError: cannot be served; caused by MemoryError: no memory"
    assert f"engine replica r1 could not start: {reason}" in caplog.text
    said = [(s.replica_id, s.state, s.version, s.error) for s in ingest.reports]
    assert said == [("r1", "failed", None, reason)]
    assert not tell_errors()


async def test_a_replica_that_starts_reports_no_failure():
    ingest = Ingest()
    async with report_failed_start(ingest, None):
        pass
    assert ingest.reports == []


class SleepingFleet:
    """Engines sleep for the first ``asked`` questions."""

    def __init__(self, asked: int, *, away: bool = False) -> None:
        self.asked = asked
        self.away = away
        """The ingest refuses a call, and then takes the same one."""
        self._refused = False
        self.heard: list[bool | None] = []
        """What each report says of memory, and None for each question."""

    def _refuse(self) -> None:
        self._refused = self.away and not self._refused
        if self._refused:
            raise NotReady("the ingest restarts")

    async def report(self, status: ReplicaStatus) -> None:
        self._refuse()
        self.heard.append(status.takes_memory)

    async def until_awake(self) -> bool:
        self._refuse()
        self.heard.append(None)
        self.asked -= 1
        return self.asked < 0


@pytest.mark.parametrize("away", [False, True], ids=["ingest there", "ingest away"])
@pytest.mark.parametrize(
    ("asked", "heard"),
    [(0, [True, None]), (3, [True, None, False, None, None, None, True, None])],
    ids=["awake", "asleep"],
)
async def test_memory_is_taken_once_that_is_reported_and_nobody_sleeps(asked, heard, away):
    fleet = SleepingFleet(asked, away=away)
    announcement = StartupHeartbeat("r1", Ingest(), 0.001)
    await announcement.take_memory(fleet)
    assert fleet.heard == heard and announcement.status().takes_memory


FREE = "0, a GPU, 80000, 79000, 9.0, 580.1, GPU-a\n1, a GPU, 80000, 79000, 9.0, 580.1, GPU-b\n"
TAKEN = FREE.replace("1, a GPU, 80000, 79000", "1, a GPU, 80000, 12000")


class Machine:
    """A host with two GPUs, on whose second one a trainer may be; and what the replica said and waited."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.naps = folder, list[str | None](), 0
        self.others_serve, self.free_after = True, 3
        (folder / "nvidia-smi").write_text(
            f'#!/bin/sh\ncase "$1" in\n--query-gpu*) while read -r line; do echo "$line"; done < {folder}/gpus ;;\n'
            '*) echo "GPU-b, 639, trainer, 67000" ;;\nesac\n'
        )
        (folder / "nvidia-smi").chmod(0o755)
        self.lists(TAKEN)

    def lists(self, gpus: str) -> None:
        (self.folder / "gpus").write_text(gpus)

    async def others(self) -> bool:
        return self.others_serve

    async def sleep(self, seconds: float) -> None:
        self.naps += 1
        if self.naps == self.free_after:
            self.lists(FREE)

    async def wait(self, *devices: str, share: float = 0.85) -> None:
        await wait_for_free_gpus(devices, share, self.told.append, self.others, self.sleep)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Machine(tmp_path)


async def test_a_replica_waits_while_a_trainer_has_its_gpu(machine, caplog):
    machine.free_after = 10  # longer than one alone would wait
    with caplog.at_level("WARNING"):
        await machine.wait("1")
    reason = "GPU 1: 12.6 GB of 83.9 GB are free, and engine.gpu_memory_utilization: 0.85 asks for 71.3 GB"
    assert machine.naps == 10 and machine.told[-1] is None
    assert machine.told[:-1] == [f"{reason}; in use by process 639 (trainer)"] * 10
    assert len(caplog.records) == 1


async def test_a_replica_alone_fails_with_the_reason(machine):
    machine.others_serve, machine.free_after = False, 1000
    with pytest.raises(GpuTaken, match=r"GPU 1: 12\.6 GB .*process 639 \(trainer\): end that process, .*CUDA_VISIBLE"):
        await machine.wait("0", "1")
    machine.naps, machine.free_after = 0, 1  # memory of an engine that has just ended takes a moment
    await machine.wait("GPU-b")
    assert machine.naps == 1


@pytest.mark.parametrize(("devices", "share"), [(("0",), 0.85), ((), 0.85), (("1",), 0.1), (("MIG-b",), 0.85)])
async def test_a_free_gpu_is_not_waited_for(machine, devices, share):
    await machine.wait(*devices, share=share)
    assert machine.told == [None] and machine.naps == 0


async def test_without_an_answer_vllm_decides(machine, caplog):
    (machine.folder / "nvidia-smi").write_text("#!/bin/sh\necho no driver; exit 9\n")
    await machine.wait("1")
    assert machine.naps == 0 and "vLLM will tell" in caplog.text
