"""A case, its load, and the running service it happens to: weights that tell their version, processes, files."""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.faults.update_marker import marked_updates
from benchmarks.update.busy import busy
from rollout_service.client import RolloutClient
from rollout_service.client._http import error_of
from rollout_service.engine.environment import engine_environment
from rollout_service.errors import RolloutServiceError
from rollout_service.local import LocalService, running_service
from rollout_service.protocol.fleet import Fleet
from rollout_service.protocol.rollout import Rollout
from rollout_service.protocol.upload import PART_DIGEST_HEADER
from tests.support.processes import descendants
from tests.support.telltale import CANDIDATES, assert_bounded, assert_pure, canary_weights

CONCURRENCY, EASED = 16, 4
EVERY_S = 0.2  # between two looks at a state
PROMPT, MAX_TOKENS = [5, 6, 7, 8], 48
SESSION_PROMPT, TURNS = 10 * PROMPT, 6
REPLICAS = 2
OWN_WORKER = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: vLLM's worker lives in the engine core's process
PROCESSES = {  # what can be killed → how its process is called
    "vllm worker": "VLLM::Worker",
    "engine core": "VLLM::EngineCore",
    "replica": "ray::ServeReplica:rollout:engine",
    "gateway": "ray::ServeReplica:rollout:gateway",
    "ingest": "ray::ServeReplica:rollout:ingest",
    "monitor": "ray::ServeReplica:rollout:monitor",
    "controller": "ray::ServeController",
}
ENGINE_PROCESSES = ("vllm worker", "engine core", "replica")  # of these, the death of one is the end of its replica
WAIT_S = 180.0  # the longest wait for a state of the service
SETTLE_S = 1.0  # how long the fleet must be sound before it counts as recovered
KEPT_CACHE: dict[str, dict[str, Any]] = {  # settings with which the KV cache outlives updates
    "weights": {"kv_cache_on_update": "keep", "kv_max_age": 2},
    "engine": {"block_size": 32},  # of several blocks in a session
}


@dataclass
class Load:
    """What came of the rollouts."""

    kv_max_age: int | None = None  # the bound of kept keys and values; None: every version drops them
    rollouts: int = 0
    kept_tokens: int = 0  # tokens that read keys and values of older versions than their own
    stale: list[str] = field(default_factory=list)  # what was wrong with completions that hold a stale token
    lost: list[str] = field(default_factory=list)
    """Errors of requests that were not answered although the client asked again and again."""

    eased: bool = False
    """Whether only ``EASED`` are under way: enough to see who serves what while an engine starts on the same cores."""

    def ease(self) -> None:
        self.eased = True

    async def once(self, client: RolloutClient, number: int) -> None:
        """Make one request, or one session, as caller ``number``."""
        if self.eased and number >= EASED:
            await asyncio.sleep(EVERY_S)
            return
        if self.kv_max_age is None:
            await self._ask(client, PROMPT)
            return
        session, prompt = uuid.uuid4().hex, SESSION_PROMPT
        for _ in range(TURNS):
            rollout = await self._ask(client, prompt, session_id=session, logprobs=CANDIDATES)
            if rollout is None:
                return
            prompt = [*prompt, *rollout.completions[0].token_ids]

    async def _ask(self, client: RolloutClient, prompt: list[int], **options: object) -> Rollout | None:
        options |= {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
        try:
            rollout = await client.generate(prompt, **options)  # type: ignore[arg-type]
        except (RolloutServiceError, httpx.TransportError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
            return None
        except asyncio.CancelledError:
            self.lost.append("still unanswered when the load was given up")
            raise
        self.rollouts += 1
        for completion in rollout.completions:
            if len(completion.token_ids) != MAX_TOKENS:
                self.lost.append(f"{len(completion.token_ids)} of {MAX_TOKENS} tokens, {completion.finish_reason}")
            try:
                if self.kv_max_age is None:
                    assert_pure(completion)
                else:
                    self.kept_tokens += assert_bounded(completion, self.kv_max_age)
            except AssertionError as error:
                self.stale.append(str(error))
        return rollout


@asynccontextmanager
async def load(url: str, concurrency: int, kv_max_age: int | None = None) -> AsyncIterator[Load]:
    """``concurrency`` requests at any time until the block ends; those under way are waited for."""
    result = Load(kv_max_age)
    client = RolloutClient(url, retries=12)
    async with client, busy(concurrency, lambda number: result.once(client, number)):
        yield result


@dataclass
class Ground:
    """The service, a client that pushes, and the newest version that was said to be committed."""

    service: LocalService
    client: RolloutClient
    committed: int
    replicas: int = REPLICAS  # how many a sound fleet has
    settle_s: float = SETTLE_S
    notes: list[str] = field(default_factory=list)  # what the case has to say of its fault
    gone: frozenset[int] = frozenset()  # processes that were killed
    replaced: frozenset[str] = frozenset()  # replicas of which one was killed: a sound fleet has others
    outage_s: float | None = None  # how long nobody was served, where the case measures it
    engine_start_s: float | None = None
    """How long the engine took to start that then served, from the making of its process to its first answer."""

    def begin(self) -> None:
        self.outage_s = self.engine_start_s = None
        self.settle_s, self.notes, self.gone, self.replaced = SETTLE_S, [], frozenset(), frozenset()

    def note(self, text: str) -> None:
        self.notes.append(text)

    async def kill(self, victim: str) -> None:
        """SIGKILL for one process of the kind."""
        process, known = random.choice(processes(victim)), await self.replica_ids()
        process.kill()
        self.killed(victim, process, known)

    def killed(self, victim: str, process: psutil.Process, known: frozenset[str]) -> None:
        """``process`` was killed when the fleet had the replicas ``known``: recovered means that it was replaced."""
        self.gone |= {process.pid}
        if victim in ENGINE_PROCESSES:
            self.replaced = known

    async def replica_ids(self) -> frozenset[str]:
        return frozenset(replica.replica_id for replica in (await self.client.fleet()).replicas)

    @property
    def kv_max_age(self) -> int | None:
        """The bound of kept keys and values; None: every version drops them."""
        weights = self.service.config.weights
        assert weights.kv_max_age != "auto", "a case checks one bound"
        return weights.kv_max_age if weights.kv_cache_on_update == "keep" else None

    @property
    def log(self) -> Path:
        return self.service.config.weights.root

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return canary_weights(self.service.config.model.path, version)

    async def push(self, version: int, **options: object) -> None:
        """Push ``version``; it counts as committed once the service says so."""
        await self.client.push_weights(version, self.weights(version), **options)  # type: ignore[call-overload]
        self.committed = max(self.committed, version)

    async def send(self, method: str, route: str, **request: Any) -> httpx.Response:
        """A single plain request, never repeated. Raises what the service answered, if it is an error."""
        token = self.service.config.auth.secret()
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=self.service.url, headers=authorization, timeout=60) as http:
            response = await http.request(method, route, **request)
        if not response.is_success:
            raise error_of(response)
        return response

    async def put_part(self, version: int, part: int, data: bytes, digest: str) -> None:
        await self.send(
            "PUT", f"/v1/weights/{version}/parts/{part}", content=data, headers={PART_DIGEST_HEADER: digest}
        )

    async def until_fleet(self, reached: Callable[[Fleet], object], what: str = "is served again") -> Fleet:
        """Wait for a state of the fleet, and return it. Raises AssertionError as ``until`` does."""

        async def look() -> Fleet | None:
            fleet = await self.client.fleet()
            return fleet if reached(fleet) else None

        found: Fleet = await until(look, f"the fleet {what}")
        return found

    async def fleet(self) -> Fleet | None:
        """The fleet, or None while nobody answers."""
        with contextlib.suppress(RolloutServiceError):
            return await self.client.fleet()
        return None

    async def recovered(self, started: float, timeout_s: float) -> float | None:
        """Seconds from ``started`` until every replica is sound at the newest version and makes rollouts of it."""
        since: float | None = None
        deadline = time.perf_counter() + timeout_s
        while since is None or time.perf_counter() - since < self.settle_s:
            if time.perf_counter() > deadline:
                return None
            if not await self._sound():
                since = None
            elif since is None:
                since = time.perf_counter()
            await asyncio.sleep(0.2)
        return since - started

    async def _sound(self) -> bool:
        fleet = await self.fleet()
        if fleet is None or fleet.latest_version < self.committed or len(fleet.replicas) != self.replicas:
            return False
        if any(r.state != "ready" or r.version != fleet.latest_version for r in fleet.replicas):
            return False
        if {replica.replica_id for replica in fleet.replicas} == self.replaced or not self._whole():
            return False
        try:
            await self.client.generate([5, 6], max_tokens=2, min_weight_version=self.committed)
        except RolloutServiceError:
            return False
        return True

    def _whole(self) -> bool:
        """Return True if every kind of process runs, and none of those that were killed."""
        wanted = {kind: self.replicas if kind in ENGINE_PROCESSES else 1 for kind in PROCESSES}
        if engine_environment(self.service.config).get(OWN_WORKER) == "0":
            wanted["vllm worker"] = 0
        wanted["gateway"] = self.service.config.scaling.gateways
        running = {kind: {process.pid for process in descendants(PROCESSES[kind])} for kind in PROCESSES}
        return all(len(running[kind]) == wanted[kind] and not running[kind] & self.gone for kind in PROCESSES)


async def until(look: Callable[[], Awaitable[Any]], what: str, seconds: float = WAIT_S) -> Any:
    """Call ``look`` until it returns something true, and return that. An error of the service counts as not yet."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(RolloutServiceError, httpx.TransportError):
                    if found := await look():
                        return found
                await asyncio.sleep(0.05)
    raise AssertionError(f"within {seconds:g} s it was not so that {what}")


def ground(folder: Path, replicas: int = REPLICAS, **overrides: dict[str, Any]) -> AbstractAsyncContextManager[Ground]:
    """The shipped CPU deployment, two replicas unless ``overrides`` say so, at a version that tells itself."""
    sections = settings(folder, replicas)
    for section, fields in overrides.items():
        sections[section] = sections.get(section, {}) | fields
    return _ground(sections, replicas)


def settings(folder: Path, replicas: int) -> dict[str, dict[str, Any]]:
    """Return what differs from the shipped CPU deployment: model and log below ``folder``, small parts."""
    return {
        "model": {"path": folder / "tiny-qwen3"},
        # with a worker that can be killed: engines that share a machine's CPUs have none of their own
        "engine": {"admission_limit": 256, "env": {OWN_WORKER: "1"}},
        "scaling": {"min_replicas": replicas, "max_replicas": replicas},
        "weights": {"root": folder / "log", "part_bytes": 256 << 10, "poll_s": 1.0, "dead_after_s": 5.0},
    }


@asynccontextmanager
async def _ground(sections: dict[str, dict[str, Any]], replicas: int) -> AsyncIterator[Ground]:
    with marked_updates(), running_service(CPU_DEPLOYMENT, sections) as service:
        async with RolloutClient(service.url, retries=12) as client:
            place = Ground(service, client, committed=0, replicas=replicas)
            await place.push(1)
            yield place


MakesGround = Callable[..., AbstractAsyncContextManager[Ground]]


class Skipped(Exception):
    """This machine cannot run the case; the message says why."""


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    name: str
    fault: Callable[[Ground], Awaitable[None]]
    """Breaks something and returns when it is up to the service to recover; raises if the service did wrong."""
    concurrency: int = CONCURRENCY  # rollouts that are under way at any time; 0: none
    ground: MakesGround = ground
    """What it happens to, made in an empty folder and with further settings. Cases in a row with the same share it, as
    long as it lives. Raises Skipped."""
    apart: Callable[..., Awaitable[Any]] | None = None
    """Instead of all that: the whole case, in a process of its own and with the same arguments; returns its
    ``Outcome``."""


def below(replica: psutil.Process, kind: str) -> psutil.Process:
    """The process of ``kind`` that belongs to ``replica``, or itself. Raises LookupError."""
    family = {process.pid for process in [replica, *replica.children(recursive=True)]}
    for process in processes(kind):
        if process.pid in family:
            return process
    raise LookupError(f"replica {replica.pid} has no process called {PROCESSES[kind]}…")


def processes(name: str) -> list[psutil.Process]:
    """Processes of one kind of ``PROCESSES``. Raises LookupError if there is none."""
    found = descendants(PROCESSES[name])
    if not found:
        raise LookupError(f"no process is called {PROCESSES[name]}…")
    return found
