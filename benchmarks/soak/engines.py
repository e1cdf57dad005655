"""How long engines took to start in the run: what a time without service is held against."""

import asyncio
import contextlib
from collections.abc import Collection

import httpx

from benchmarks.soak.diary import Diary
from benchmarks.soak.strike import victims
from rollout_service.client import RolloutClient
from rollout_service.errors import RolloutServiceError

LOOK_S, ANSWER_S = 0.25, 2.0


class EngineStarts:
    """Looks at the replicas' processes and at the table of the fleet."""

    def __init__(self, url: str, diary: Diary) -> None:
        self._url, self._diary = url, diary
        self._seen: set[int] = set()
        self._starting: dict[int, float] = {}
        self._ready: set[str] | None = None
        self.seconds: list[float] = []
        """From the first sight of a replica's process until a new replica was ready, for each that came so far."""

    async def run(self) -> None:
        """Until it is cancelled."""
        async with RolloutClient(self._url, retries=0) as client:
            while True:
                pids = {process.pid for process in (await asyncio.to_thread(victims))["replica"]}
                ready: set[str] = set()
                with contextlib.suppress(RolloutServiceError, httpx.TransportError, TimeoutError):
                    async with asyncio.timeout(ANSWER_S):  # the ingest may stand still
                        ready = {r.replica_id for r in (await client.fleet()).replicas if r.state == "ready"}
                self.look(self._diary.now(), pids, ready)
                await asyncio.sleep(LOOK_S)

    def look(self, now_s: float, pids: Collection[int], ready: Collection[str]) -> None:
        """``pids``: of the replicas' processes. ``ready``: ids of the replicas that are, nothing while nobody says.

        The first look only takes down who is there. The process that was seen first is the one that is ready first.
        """
        if self._ready is None:
            self._seen, self._ready = set(pids), set(ready)
            return
        self._starting |= {pid: now_s for pid in pids if pid not in self._seen}
        self._starting = {pid: since_s for pid, since_s in self._starting.items() if pid in pids}
        self._seen |= set(pids)
        for replica_id in set(ready) - self._ready:
            self._ready.add(replica_id)
            if self._starting:
                since_s = self._starting.pop(next(iter(self._starting)))
                self.seconds.append(now_s - since_s)
                self._diary.note("engine started", replica=replica_id, seconds=round(self.seconds[-1], 2))
