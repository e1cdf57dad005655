"""An engine and an ingest in this process: what the follower talks to, with gates where a test wants to look."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout_service.engine.weight_sync import WeightSync
from rollout_service.errors import EngineFailed, MemoryTaken, NotReady
from rollout_service.protocol.fleet import PauseMode, ReplicaStatus, Staging
from rollout_service.protocol.weight_log import DesiredState, Head
from rollout_service.store.log import WeightLog, verify_tensors
from rollout_service.store.manifest import read_manifest
from tests.unit.store.versions import commit

LONG_S = 30.0


class Gate:
    """Open unless closed; whoever passes a closed one waits, and ``reached`` tells that somebody does."""

    def __init__(self) -> None:
        self._open, self.reached = asyncio.Event(), asyncio.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    async def until_reached(self) -> None:
        await asyncio.wait_for(self.reached.wait(), LONG_S)

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.reached.set()
        await self._open.wait()


class FakeEngine:
    """Keeps the order of what is done to it, checks what it stages, and loads nothing."""

    def __init__(self) -> None:
        self.broken: str | None = None
        self.staging: Staging | None = "memory"
        self.calls: list[str] = []
        self.paused = False
        self.fail_load: str | None = None
        self.fail_stage: str | None = None
        self.memory_taken: str | None = None
        self.reading, self.pausing, self.draining, self.loading = Gate(), Gate(), Gate(), Gate()
        """``draining``: a pause with ``wait`` passes it when the last running rollout has finished."""
        self.staged: list[int] = []
        """Versions that were begun to be read, each time."""
        self.before_reading: Callable[[int], None] = lambda version: None

    def new_calls(self) -> list[str]:
        """The calls since the last time."""
        calls = list(self.calls)
        self.calls.clear()
        return calls

    @property
    def loads(self) -> list[str]:
        """The loads among the calls."""
        return [call for call in self.calls if call.startswith("load")]

    async def abort(self) -> None:
        self.calls.append("abort")

    async def pause(self, mode: PauseMode, clear_cache: bool = True) -> None:
        await self.pausing.passed()
        self.calls.append(f"pause {mode}" if clear_cache else f"pause {mode} and keep the cache")
        if mode == "wait":
            await self.draining.passed()
        self.paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def sleep(self) -> None:
        assert self.paused
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        if self.memory_taken is not None:
            raise MemoryTaken(self.memory_taken)
        self.calls.append("wake up")

    def bound_kv_age(self, max_age: int) -> None:
        self.calls.append(f"bound age {max_age}")

    async def stage(self, folder: Path, digest: str | None = None) -> None:
        """Reads and checks a version's tensors, as the workers of an engine do."""
        if self.fail_stage is not None:
            raise EngineFailed(self.fail_stage)
        manifest = read_manifest(folder)
        assert manifest.digest == digest
        self.staged.append(manifest.version)
        self.before_reading(manifest.version)
        await self.reading.passed()
        await asyncio.to_thread(verify_tensors, manifest, folder)

    async def load(self, folder: Path, version: int, keep_cache: bool = False) -> float:
        assert self.paused and (folder / "manifest.json").is_file()
        await self.loading.passed()
        if self.fail_load is not None:
            self.broken = self.fail_load
            raise EngineFailed(self.fail_load)
        self.calls.append(f"load {version}" + (" and keep the cache" if keep_cache else ""))
        return 0.5


class FakeIngest:
    """Answers long polls as the ingest does, and keeps every report."""

    POLL_S = 0.02

    def __init__(self, desired: DesiredState) -> None:
        self._desired = desired
        self.seen: DesiredState | None = None
        """What the replica has heard last."""
        self._changed = asyncio.Condition()
        self.unreachable: Exception | None = None
        """Raised by every call while it is set."""
        self.reports: list[ReplicaStatus] = []
        self.left: list[str] = []
        """Replicas that said goodbye."""
        self.pins: dict[str, Head | None] = {}
        """Group → the version to which it is pinned."""
        self.looked_for_pins = 0
        self.pins_unreachable: asyncio.Event | None = None
        """Set by a call for a pin, which then fails; None: such calls are answered."""

    async def change(self, **changes: object) -> None:
        """Change what replicas should be like, and wake them. Each pause and resume has an order of its own."""
        order = {"order": uuid.uuid4().hex} if "paused" in changes else {}
        self._desired = self._desired.model_copy(update=order | changes)
        await self._notify()

    async def order(self, name: str, **changes: object) -> ReplicaStatus:
        """The first report of a replica that has obeyed these changes, which are an order of this name."""
        await self.change(order=name, **changes)
        return await self.reported(lambda status: status.obeyed == name)

    async def reported(self, reached: Callable[[ReplicaStatus], bool]) -> ReplicaStatus:
        """The first report, from the last one on, that is as asked."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: bool(self.reports) and reached(self.reports[-1]))
            return self.reports[-1]

    async def sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState:
        self.seen = seen
        await self.report(status)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.POLL_S), self._changed:
                await self._changed.wait_for(lambda: self.unreachable is not None or self._desired != seen)
        if self.unreachable is not None:
            raise self.unreachable
        return self._desired

    async def report(self, status: ReplicaStatus) -> None:
        if self.unreachable is not None:
            raise self.unreachable
        self.reports.append(status)
        await self._notify()

    async def goodbye(self, replica_id: str) -> None:
        if self.unreachable is not None:
            raise self.unreachable
        self.left.append(replica_id)

    async def pinned(self, group: str) -> Head | None:
        if self.unreachable is not None:
            raise self.unreachable
        if self.pins_unreachable is not None:
            self.pins_unreachable.set()
            raise NotReady("the ingest restarts")
        self.looked_for_pins += 1
        return self.pins[group]

    async def leave(self, error: Exception) -> None:
        """Fail every call, those that wait included."""
        self.unreachable = error
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def push(log: WeightLog, ingest: FakeIngest, version: int, **kind: Any) -> None:
    commit(log, version, **kind)
    await ingest.change(version=version)


async def push_until_served(weight_sync: WeightSync, log: WeightLog, ingest: FakeIngest, version: int) -> None:
    """Push a version; returns once it is served."""
    await push(log, ingest, version)
    await serving(weight_sync, ingest, version)


async def push_and_hold(log: WeightLog, ingest: FakeIngest, engine: FakeEngine, version: int) -> None:
    """Push a version; returns while the engine loads it, which it does until ``engine.loading.open()``."""
    engine.loading.close()
    await push(log, ingest, version)
    await engine.loading.until_reached()


async def serving(weight_sync: WeightSync, ingest: FakeIngest, version: int) -> None:
    await ingest.reported(lambda s: s.version == version and s.state == "ready")
    assert weight_sync.version == version
