"""The LoRA adapters that one replica holds.

The ingest names the versions to hold, as part of the desired state. A version is loaded while the engine serves, and
then published: new rollouts take it, running ones keep theirs. A version that is no longer wanted is removed when its
last rollout has ended.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout_service.errors import Asleep, InvalidManifest, LogCorrupt, NotFound, NotReady, TooEarly
from rollout_service.protocol.adapters import AdapterVersion, HeldAdapter, WantedAdapter
from rollout_service.runtime.rpc import IngestCalls
from rollout_service.runtime.tasks import ChangeNotifier
from rollout_service.store.adapters import ADAPTER_FILES, AdapterStore

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Time in seconds after which a version that could not be loaded is tried again."""
_READ_AGAIN_S = 1.0
"""Time in seconds after which files that could not be read once are read again."""


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter version in the engine."""

    adapter: AdapterVersion
    number: int
    """vLLM's identifier of it, unique within the engine."""
    folder: Path


class AdapterEngine(Protocol):
    """The part of the engine adapter that loads adapters."""

    async def add_adapter(self, loaded: LoadedAdapter) -> None: ...
    async def remove_adapter(self, loaded: LoadedAdapter) -> None: ...


@dataclass
class _Held:
    loaded: LoadedAdapter
    lock: int
    """Descriptor that keeps its files on disk: vLLM reads them again after it has released memory."""
    running: int = 0


class ReplicaAdapters:
    """Loads, publishes and removes the adapters of one replica."""

    def __init__(
        self,
        engine: AdapterEngine,
        store: AdapterStore,
        max_live: int,
        served: Callable[[], str | None],
        ingest: IngestCalls | None = None,
    ) -> None:
        """Create the follower.

        Args:
            engine: the replica's engine.
            store: the log's adapters, or this node's copies of them.
            max_live: the maximum number of versions in the engine.
            served: returns the digest of the served weights. None: the engine has none.
            ingest: the source of copies. None: ``store`` is the log's own.
        """
        self._engine, self._store, self._max_live = engine, store, max_live
        self._served, self._ingest = served, ingest
        self._held: dict[AdapterVersion, _Held] = {}
        self._failed: dict[AdapterVersion, tuple[str, float]] = {}
        self._unread: set[AdapterVersion] = set()
        """Versions whose files could not be read once. That is not reported yet: a caller would give them up."""
        self._wanted: tuple[AdapterVersion, ...] = ()
        self._woken, self._moved = asyncio.Event(), ChangeNotifier()
        self._next_number = 1

    def want(self, adapters: tuple[AdapterVersion, ...]) -> None:
        """Set the versions to hold, oldest first. ``follow`` loads them."""
        self._wanted = adapters
        self._woken.set()

    async def follow(self) -> AsyncIterator[None]:
        """Load and remove versions as wanted, forever. Yields after each change. Raises EngineFailed."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if await self.settle():
                yield

    async def settle(self) -> bool:
        """Load and remove versions as wanted. Return True if something has changed. Raises EngineFailed.

        Does nothing while the engine has no weights: a sleeping engine has no memory for adapters either.
        """
        if self._served() is None:
            return False
        changed = False
        for adapter, held in list(self._held.items()):
            # asked of each, since a rollout may take it while another one is removed
            if adapter in self._wanted or held.running or adapter not in self._held:
                continue
            await self._remove(adapter)
            changed = True
        self._failed = {adapter: failure for adapter, failure in self._failed.items() if adapter in self._wanted}
        for adapter in self._wanted:
            if adapter in self._held or len(self._held) >= self._max_live:
                continue
            if adapter in self._failed and time.monotonic() < self._failed[adapter][1]:
                continue
            await self._load(adapter)
            changed = True
        if changed and self._ingest is not None:
            await asyncio.to_thread(self._store.sweep, self._wanted)
        return changed

    def status(self) -> tuple[HeldAdapter, ...]:
        """Return the versions that are held, or could not be loaded."""
        held = [_report(adapter, running=held.running) for adapter, held in self._held.items()]
        return (*held, *(_report(adapter, error=error) for adapter, (error, _) in self._failed.items()))

    async def wait_for(self, wanted: WantedAdapter, timeout_s: float) -> bool:
        """Wait until a version that ``wanted`` accepts is held. Return False after ``timeout_s``."""
        return await self._moved.wait(lambda: self._find(wanted) is not None, timeout_s)

    @contextmanager
    def use(self, wanted: WantedAdapter | None) -> Iterator[LoadedAdapter | None]:
        """Keep a version that ``wanted`` accepts in the engine within the context. Raises TooEarly if none is held."""
        if wanted is None:
            yield None
            return
        held = self._find(wanted)
        if held is None:
            live = {str(adapter): held.running for adapter, held in self._held.items()}
            raise TooEarly(f"no adapter {wanted} is held here, but {list(live)}: push it", {"adapters": list(live)})
        held.running += 1
        try:
            yield held.loaded
        finally:
            held.running -= 1
            if not held.running and held.loaded.adapter not in self._wanted:
                self._woken.set()

    def _find(self, wanted: WantedAdapter) -> _Held | None:
        """Return the newest version that qualifies. A version that is being removed qualifies if it is named exactly,
        so that an interrupted completion can continue."""
        found = [
            held
            for adapter, held in self._held.items()
            if adapter.name == wanted.name
            and wanted.accepts(adapter.version)
            and self._served() in (None, adapter.base_digest)  # requests of a sleeping replica wait in the engine
            and (adapter in self._wanted or wanted.exact_version is not None)
        ]
        return max(found, key=lambda held: held.loaded.adapter.version, default=None)

    async def _load(self, adapter: AdapterVersion) -> None:
        started, lock = time.perf_counter(), -1
        try:
            lock = await self._files(adapter)
            loaded = LoadedAdapter(adapter, self._next_number, self._store.folder(adapter))
            self._next_number += 1
            await self._engine.add_adapter(loaded)
        except (Asleep, InvalidManifest, LogCorrupt, NotFound, NotReady, OSError) as error:
            if lock >= 0:
                os.close(lock)
            if isinstance(error, Asleep):  # it is wanted again when the engine has weights
                return
            logger.error("adapter %s is not loaded: %s", adapter, error)
            if isinstance(error, OSError) and adapter not in self._unread:
                self._unread.add(adapter)
                asyncio.get_running_loop().call_later(_READ_AGAIN_S, self._woken.set)
                return
            self._failed[adapter] = str(error), time.monotonic() + RETRY_S
            return
        self._failed.pop(adapter, None)
        self._unread.discard(adapter)
        self._held[adapter] = _Held(loaded, lock)
        logger.info("adapter %s is live after %.3f s", adapter, time.perf_counter() - started)
        await self._moved.notify()

    async def _files(self, adapter: AdapterVersion) -> int:
        """Check a version's files, after fetching them if necessary. Return the descriptor that locks them.

        Raises NotFound, NotReady, LogCorrupt, OSError.
        """
        try:
            return await self._checked_files(adapter)
        except LogCorrupt as error:
            if self._ingest is None:
                raise
            logger.warning("%s; it is fetched again", error)
        await asyncio.to_thread(self._store.sweep, [each for each in self._wanted if each != adapter])
        return await self._checked_files(adapter)

    async def _checked_files(self, adapter: AdapterVersion) -> int:
        if self._ingest is not None and not self._store.folder(adapter).is_dir():
            files = {}
            for file in ADAPTER_FILES:
                content = bytearray()
                while piece := await self._ingest.adapter_file(adapter, file, len(content)):
                    content += piece
                files[file] = bytes(content)
            await asyncio.to_thread(self._store.add_copy, adapter, files)
        lock = self._store.hold(adapter)
        try:
            await asyncio.to_thread(self._store.verify, adapter)
        except BaseException:
            os.close(lock)
            raise
        return lock

    async def _remove(self, adapter: AdapterVersion) -> None:
        held = self._held.pop(adapter)  # before the await, so that no call begins to use it
        await self._engine.remove_adapter(held.loaded)
        os.close(held.lock)
        logger.info("adapter %s is removed", adapter)


def _report(adapter: AdapterVersion, running: int = 0, error: str | None = None) -> HeldAdapter:
    return HeldAdapter(name=adapter.name, version=adapter.version, digest=adapter.digest, running=running, error=error)
