"""Typed calls between the Serve deployments, and the conversion of Ray's failures to errors of the service.

An interface here lists the methods of a deployment that other processes call. mypy checks the deployment (beside its
class) and every caller against it. A call of any deployment raises:

    an error of ``errors.py``  as it was raised there
    NotReady                   the deployment died with the call, does not run, or did not take it. With
                               ``is_given_up`` in the detail, Serve has given it up, or is removing it
    DeploymentFailed           it raised any other error: a bug, or a broken machine
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from rollout_service.compat.ray_internals import continue_trace
from rollout_service.errors import DeploymentFailed, EngineFailed, InsufficientStorage, NotReady, RolloutServiceError
from rollout_service.protocol.adapters import (
    AdapterStatus,
    AdapterUpload,
    AdapterVersion,
    BeginAdapter,
    CommitAdapter,
)
from rollout_service.protocol.fleet import Fleet, KVCacheChoice, PauseMode, ReplicaStatus, SleepTag
from rollout_service.protocol.mismatch import MismatchReceipt, MismatchTable, Suspicion
from rollout_service.protocol.progress import ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import OnAbort, Rollout
from rollout_service.protocol.sampling import GenerateCall
from rollout_service.protocol.sessions import Message, OpenSession, Prefix, SessionSnapshot, Turn
from rollout_service.protocol.upload import (
    Announcement,
    CommitUpload,
    Listener,
    PullWeights,
    RollBack,
    SharedTensors,
    TrainerRecipe,
    UploadPlan,
)
from rollout_service.protocol.weight_log import DesiredState, Head, LogFile, Newest
from rollout_service.protocol.weight_transfer import TransferInit, TransferStatus
from rollout_service.protocol.weights import ServiceState, TensorDigests, WeightStatus
from rollout_service.runtime.placements import PLACEMENTS, Placements
from rollout_service.tracing import only_the_trace, step_of_trace

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class IngestCalls(Protocol):
    """The ingest, for gateways and replicas. Its methods are documented in ``ingest/ingest.py``."""

    # trainers, through a gateway
    async def recipe(self) -> TrainerRecipe: ...
    async def begin(self, begin: Announcement, reached: str | None = None) -> UploadPlan: ...
    async def listener(self, version: int, node_id: str | None) -> Listener: ...
    async def take_shared(self, version: int, batch: SharedTensors) -> None: ...
    async def push_folder(
        self, path: Path, request: CommitUpload, number: int | None = None, label: str | None = None
    ) -> WeightStatus: ...
    async def pull_weights(self, request: PullWeights) -> WeightStatus: ...
    async def roll_back(self, request: RollBack) -> WeightStatus: ...
    async def version_of(self, label: str) -> int: ...
    async def commit(self, version: int, request: CommitUpload) -> WeightStatus: ...
    async def discard(self, version: int) -> None: ...
    async def status(self, version: int) -> WeightStatus: ...
    async def versions(self) -> list[WeightStatus]: ...

    # trainers that broadcast, through a gateway; see ``ingest/weight_transfer.py``
    async def weight_transfer(self) -> TransferStatus: ...
    async def init_weight_transfer(self, init: TransferInit) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, announced: object) -> None: ...
    async def finish_weight_update(self, label: str | None) -> WeightStatus: ...
    async def shutdown_weight_transfer(self) -> None: ...
    async def tensor_digests(self) -> TensorDigests: ...
    async def snapshot(self, taken: TensorDigests | None = None) -> TensorDigests | None: ...

    # adapters; see ``ingest/adapters.py``
    async def begin_adapter(self, name: str, begin: BeginAdapter) -> AdapterUpload: ...
    async def adapter_part(self, name: str, digest: str, index: int, content: bytes) -> None: ...
    async def commit_adapter(self, name: str, request: CommitAdapter) -> AdapterStatus: ...
    async def remove_adapter(self, name: str) -> None: ...
    async def adapters(self) -> list[AdapterStatus]: ...
    async def adapter_file(self, adapter: AdapterVersion, file: str, offset: int) -> bytes: ...

    # operators, through a gateway
    async def set_paused(
        self,
        paused: bool,
        mode: PauseMode,
        timeout_s: float,
        on_abort: OnAbort = "continue",
        clear_cache: bool = True,
    ) -> None: ...
    async def drop_kv_cache(self, timeout_s: float) -> None: ...
    async def abort_running(self, timeout_s: float) -> None: ...
    async def is_paused(self) -> bool: ...
    async def sleep(self, mode: PauseMode, timeout_s: float) -> None: ...
    async def wake_up(self, tags: Collection[SleepTag], timeout_s: float) -> bool: ...
    async def is_sleeping(self) -> bool: ...
    async def fleet(self) -> Fleet: ...
    async def state(self) -> ServiceState: ...

    # replicas
    async def until_awake(self) -> bool: ...
    async def sync(self, status: ReplicaStatus, seen: DesiredState | None) -> DesiredState: ...
    async def report(self, status: ReplicaStatus) -> None: ...
    async def goodbye(self, replica_id: str) -> None: ...
    async def newest(self) -> Newest: ...
    async def pinned(self, group: str) -> Head | None: ...
    async def files(self, version: int) -> tuple[LogFile, ...]: ...
    async def chunk(self, version: int, file: str, index: int) -> list[ObjectRef]: ...
    async def kv_cache_choice(self) -> KVCacheChoice | None: ...
    async def choose_kv_cache(self, choice: KVCacheChoice) -> KVCacheChoice: ...


class EngineCalls(Protocol):
    """An engine replica that the router chooses, for gateways; see ``engine/replica.py``."""

    async def generate(self, call: GenerateCall) -> Rollout: ...
    async def progress(self, ask: ProgressAsk) -> ProgressReply: ...


class MonitorCalls(Protocol):
    """The monitor, for gateways and replicas; see ``monitor/monitor.py``."""

    async def report(self, body: bytes) -> MismatchReceipt: ...
    async def table(
        self, version: int | None = None, replica_id: str | None = None, adapter: str | None = None
    ) -> MismatchTable: ...
    async def per_replica(self) -> MismatchTable: ...
    async def suspicions(self) -> dict[int, tuple[Suspicion, ...]]: ...
    async def kv_max_age(self, version: int) -> int: ...


class SessionCalls(Protocol):
    """The open sessions, for gateways; see ``sessions/store.py``."""

    async def open(self, wanted: OpenSession) -> str: ...
    async def num_turns(self, session_id: str) -> int: ...
    async def prefix(
        self, session_id: str, messages: Sequence[Message], context: object, *, begins_turn: bool = False
    ) -> Prefix | None: ...
    async def add(
        self, session_id: str, messages: Sequence[Message], context: object, turns: Sequence[Turn]
    ) -> None: ...
    async def end_turn(self, session_id: str) -> None: ...
    async def get(self, session_id: str) -> SessionSnapshot: ...
    async def close(self, session_id: str) -> None: ...


def ingest_client(handle: DeploymentHandle) -> IngestCalls:
    """Return a client for the handle of the ingest's deployment."""
    return cast(IngestCalls, _Client(handle, "ingest"))


def monitor_client(handle: DeploymentHandle) -> MonitorCalls:
    """Return a client for the handle of the monitor's deployment."""
    return cast(MonitorCalls, _Client(handle, "monitor"))


def session_client(handle: DeploymentHandle) -> SessionCalls:
    """Return a client for the handle of the sessions' deployment."""
    return cast(SessionCalls, _Client(handle, "sessions"))


async def until_answered(ask: Callable[[], Awaitable[_Answer]], poll_s: float) -> _Answer:
    """Return the ingest's answer. Asks again every ``poll_s`` seconds while the ingest is away or its disk is full."""
    while True:
        try:
            return await ask()
        except (InsufficientStorage, NotReady) as error:
            logger.warning("waiting for the ingest: %s", error)
            await asyncio.sleep(poll_s)


class EngineClient:
    """Client for the handle of the engines' deployment."""

    def __init__(self, handle: DeploymentHandle, placements: Placements = PLACEMENTS) -> None:
        """``placements``: is told which replica a call is sent to."""
        self._handle, self._placements = handle, placements

    async def generate(self, call: GenerateCall) -> Rollout:
        """See ``EngineReplica.generate``. Cancelling the call also cancels it there.

        Raises EngineFailed when the replica is lost with the call, with its ``replica_id`` in the detail, if known.
        """
        # Serve's router identifies pending calls by an id that all calls of one HTTP request share; outside of the
        # request's context each call has its own
        with _translate_errors("engine"):
            try:
                return await asyncio.create_task(self._generate(call), context=only_the_trace())
            except RayActorError as error:
                raise EngineFailed(f"the replica died with this call: {error}") from error

    async def _generate(self, call: GenerateCall) -> Rollout:
        try:
            async with _dispatched(self._handle, "engine", "generate", call) as (replica_id, response):
                self._placements.note(call.origin, call.number, replica_id)
                try:
                    rollout: Rollout = await response
                except asyncio.CancelledError:
                    response.cancel()
                    raise
            return rollout
        finally:
            self._placements.end(call.origin, call.number)

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        """See ``EngineReplica.progress``. Raises NotReady if that replica is gone."""
        with _translate_errors("engine"):
            reply: ProgressReply = await asyncio.create_task(
                _send(self._handle, "engine", "progress", ask), context=only_the_trace()
            )
        return reply


def report_from_thread(ingest: DeploymentHandle, status: ReplicaStatus, timeout_s: float) -> None:
    """Call ``IngestCalls.report`` from a thread without an event loop. Also raises TimeoutError."""

    async def report() -> None:
        async with asyncio.timeout(timeout_s):
            await ingest_client(ingest).report(status)

    asyncio.run(report())


class _Client:
    """Has all methods of a deployment; the interfaces above are for mypy."""

    def __init__(self, handle: DeploymentHandle, deployment: str) -> None:
        self._handle, self._deployment = handle, deployment

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: object, **named: object) -> Any:
            with _translate_errors(self._deployment):
                return await _send(self._handle, self._deployment, method, *args, **named)

        return call


@asynccontextmanager
async def _dispatched(
    handle: DeploymentHandle, deployment: str, method: str, *args: object, **named: object
) -> AsyncIterator[tuple[str, DeploymentResponse[Any]]]:
    """Send a call to a replica that the router chooses. Yields the replica's id and the response."""
    bound: DeploymentHandle = getattr(handle, method)
    # Serve sends plain ``remote`` calls as streams (2.60.0). At its end, a stream blocks all calls of the replica until
    # the caller has confirmed every item, which a hung process never does. Calls to a reserved slot are not streams.
    async with AsyncExitStack() as stack:
        with step_of_trace(f"route_to_replica {deployment} {method}") as trace:
            replica = await stack.enter_async_context(bound.choose_replica(*args, **named))
            if trace:
                continue_trace(replica, trace)
            response = bound.dispatch(replica, *args, **named)
        yield replica.replica_id, response


async def _send(handle: DeploymentHandle, deployment: str, method: str, *args: object, **named: object) -> Any:
    """Return the reply of a replica that the router chooses. Cancelling this does not cancel the call there."""
    async with _dispatched(handle, deployment, method, *args, **named) as (_, response):
        return await response


@contextmanager
def _translate_errors(deployment: str) -> Iterator[None]:
    """Convert Ray's errors, as the module's docstring describes."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RolloutServiceError):
            raise error.cause from None
        raise DeploymentFailed(f"the {deployment} failed with {error.cause!r}: see the service's log") from error
    except RayActorError as error:
        raise NotReady(f"the {deployment} died with this call: send it again ({error})") from error
    except DeploymentUnavailableError as error:
        raise NotReady(
            f"no replica of the {deployment} can be started: see the service's log, and GET /health ({error})",
            {"is_given_up": True},
        ) from error
    except (RayError, RayServeException) as error:
        raise NotReady(f"the {deployment} did not take this call: send it again ({error})") from error
