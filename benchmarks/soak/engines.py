"""How long engines took to start in the run: what a time without service is held against."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import httpx
import psutil

from benchmarks.faults.ground import ENGINE_PROCESSES
from benchmarks.soak.account import Diary
from benchmarks.soak.strike import victims
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError
from tests.support.processes import alive

LOOK_S, ANSWER_S = 0.25, 2.0


@dataclass(frozen=True)
class EngineStart:
    """The start of one engine, in seconds after the beginning of the run."""

    from_s: float  # when the replica's process was made
    ready_s: float  # when the replica was ready

    @property
    def seconds(self) -> float:
        return self.ready_s - self.from_s


class EngineStarts:
    """Look at the replicas' processes and at the table of the fleet."""

    def __init__(self, url: str, diary: Diary, told_to_end: Callable[[], Collection[int]]) -> None:
        """``told_to_end``: return the pids of processes that were struck with SIGTERM or SIGKILL."""
        self._url, self._diary, self._told_to_end = url, diary, told_to_end
        self._seen: set[int] = set()
        self._starting: dict[int, float] = {}
        self._ready: set[str] | None = None
        self.starts: list[EngineStart] = []
        """One for each replica that became ready."""
        self.unserved: list[tuple[float, float]] = []
        """Times in which no replica had a live engine: each was starting, or a process of it stopped, dead or told
        to end: from, until."""
        self._looked_s = 0.0

    async def run(self) -> None:
        """Look until it is cancelled."""
        async with RolloutClient(self._url, retries=0) as client:
            while True:
                made, live = await asyncio.to_thread(self._processes)
                ready: set[str] = set()
                with contextlib.suppress(RolloutServiceError, httpx.TransportError, TimeoutError):
                    async with asyncio.timeout(ANSWER_S):  # the ingest may stand still
                        ready = {r.replica_id for r in (await client.fleet()).replicas if r.state == "ready"}
                self.look(self._diary.now(), made, ready, live)
                await asyncio.sleep(LOOK_S)

    def _processes(self) -> tuple[dict[int, float], set[int]]:
        """Return when each replica's process was made, in seconds after the beginning of the run, and the replicas
        whose engine core and worker run, too."""
        made, found = dict[int, float](), victims()
        for process in found["replica"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                made[process.pid] = self._diary.now() - (time.time() - process.create_time())
        ends = set(self._told_to_end())
        running = {
            kind: _running([process for process in found[kind] if process.pid not in ends]) for kind in ENGINE_PROCESSES
        }
        with_workers = set(running["vllm worker"].values())
        with_cores = {parent for pid, parent in running["engine core"].items() if pid in with_workers}
        return made, running["replica"].keys() & with_cores

    def look(self, now_s: float, made: Mapping[int, float], ready: Collection[str], live: Collection[int]) -> None:
        """Take in the replicas' processes, pid → when it was made, and the ids of those that are ready."""
        if self._ready is None:
            self._seen, self._ready = set(made), set(ready)
            return
        self._starting |= {pid: made_s for pid, made_s in made.items() if pid not in self._seen}
        self._starting = {pid: made_s for pid, made_s in self._starting.items() if pid in made}
        self._seen |= set(made)
        for replica_id in set(ready) - self._ready:
            self._ready.add(replica_id)
            if self._starting:
                start = EngineStart(self._starting.pop(next(iter(self._starting))), now_s)
                self.starts.append(start)
                self._diary.note("engine started", replica=replica_id, seconds=round(start.seconds, 2))
        if not set(live) - self._starting.keys():
            if self.unserved and self.unserved[-1][1] == self._looked_s:
                self.unserved[-1] = (self.unserved[-1][0], now_s)
            else:
                self.unserved.append((now_s, now_s))
        self._looked_s = now_s


def _running(processes: Collection[psutil.Process]) -> dict[int, int]:
    """Return the pids of those that are neither dead nor stopped, each with its parent's."""
    found: dict[int, int] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if alive(process) and process.status() != psutil.STATUS_STOPPED:
                found[process.pid] = process.ppid()
    return found
