"""vLLM's weight updates in the ingest: a trainer joins, announces tensors, broadcasts them, and commits.

    no group   → joining    POST /init_weight_transfer_engine: a receiver process joins the trainer's group
    joining    → joined     the group is complete; on an error back to no group
    joined     → started    POST /start_weight_update: the next version is laid out
    started    → receiving  POST /update_weights: any number of times, some tensors each time
    receiving  → started    all announced tensors have arrived; they are converted as they arrive
    started    → finishing  POST /finish_weight_update: committed, and served by every live replica
    finishing  → joined
    any        → joining    another init: the receiver is killed, and an unfinished update is dropped
    any        → no group   POST /shutdown_weight_transfer_engine, or the receiver has ended

Trainers repeat a request if its reply was lost or was 500, 502 or 503. Each step is therefore a task: a repeated
request awaits the same task and gets the same answer. Permanent errors are 4xx.

A trainer that has begun to broadcast waits for the receiver, with NCCL without a limit. Therefore the tensors of an
invalid announcement, such as an unknown name or a missing start, are received before the request is refused. Only an
announcement without the number of bytes is refused at once, and the receiver ends with it.

vLLM 0.33's trainer announces its tensors once. Later rounds have empty tables, and repeat the last round that the
trainer finished. A group therefore keeps the tables of its last finished update, one for each request.

A version is complete. vLLM itself would keep the old values of tensors that were not sent; here an update with missing
tensors fails at its finish, and the error names them.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, get_args

from pydantic import ValidationError

from rollout_service.compat.pydantic_internals import fail_fast_validator
from rollout_service.errors import (
    CommitTimeout,
    InsufficientStorage,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    RolloutServiceError,
    WeightTransferFailed,
)
from rollout_service.ingest.conversion import Bucket
from rollout_service.ingest.receiver.receiver import Read, Receiver, backend_here
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.model.quant_plan import QuantPlan
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.ignored import IgnoredTensors
from rollout_service.protocol.upload import SourceDtype, UploadTensor
from rollout_service.protocol.weight_transfer import (
    TensorsToCome,
    TransferBackend,
    TransferInit,
    TransferState,
    TransferStatus,
)
from rollout_service.protocol.weights import WeightStatus
from rollout_service.web.errors import validation_error

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Versions(Protocol):
    """The methods of the ingest that a transfer uses; see ``ingest/ingest.py``."""

    async def begin_broadcast(self) -> UploadSession: ...
    async def commit_broadcast(self, staged: UploadSession, label: str | None) -> WeightStatus: ...
    async def drop_broadcast(self, staged: UploadSession) -> None: ...


class Update:
    """One version between start and finish."""

    def __init__(self, staged: UploadSession, group: "Group", repeatable: Sequence[TensorsToCome]) -> None:
        self.staged, self.group = staged, group
        self.repeatable = repeatable
        """Tables of an earlier update, in order; an empty announcement repeats the one at its place."""
        self.tables: list[TensorsToCome] = []
        """The table of each request of this update, in order."""
        self.announced: dict[str, UploadTensor] = {}
        """All tensors but ignored ones, which are received and dropped."""
        self.failure: RolloutServiceError | None = None
        """Error because of which it cannot be finished."""
        self.finishing: asyncio.Task[WeightStatus] | None = None

    @property
    def committing(self) -> bool:
        """Return True while it is being finished."""
        return self.finishing is not None and not self.finishing.done()

    def convert(self, names: Sequence[str], read: Read) -> Future[None] | None:
        """Start to convert tensors; None if the version has failed, or ignores all of them."""
        self.failure = self.failure or self.staged.failure
        names = [name for name in names if name in self.announced]
        if self.failure is not None or not names:
            return None
        try:
            return self.staged.convert(Bucket(names, partial(read, names)))
        except NotFound as error:
            self.failure = error
            return None


class Reception(NamedTuple):
    """One call of ``/update_weights``."""

    update: Update | None
    """None: no update was started, and the tensors are dropped."""
    tensors: TensorsToCome
    is_repeat: bool
    """True if it was announced by an empty table."""
    task: asyncio.Task[None]


class Group:
    """One receiver in one trainer's group."""

    def __init__(self, init: TransferInit, backend: TransferBackend, largest_tensor_bytes: int) -> None:
        """Start to join the group. Raises OSError if the process cannot be started."""
        self.init, self.used = init, False
        self.receiver = Receiver(largest_tensor_bytes)
        self.joining = _task(self.receiver.join(init, backend))
        self.last: Reception | None = None
        self.finished_tables: Sequence[TensorsToCome] = ()
        """Tables of the last finished update."""

    @property
    def joined(self) -> bool:
        """Return True if broadcasts can be received."""
        return self.joining.done() and not self.joining.cancelled() and self.joining.exception() is None

    @property
    def receiving(self) -> bool:
        """Return True while broadcasts are being received."""
        return self.last is not None and not self.last.task.done()


class WeightTransfer:
    """Weight updates by vLLM's protocol, of one trainer at a time. Lives in the ingest's event loop."""

    def __init__(self, versions: Versions, model: ServedModel, plan: QuantPlan) -> None:
        self._versions, self._model, self._plan = versions, model, plan
        self._group: Group | None = None
        self._update: Update | None = None
        self._error: str | None = None
        self._turn = asyncio.Lock()
        """Held while a request is interpreted, not while waiting for a trainer."""

    def status(self) -> TransferStatus:
        """Return the state of the transfer."""
        return TransferStatus(backend=backend_here(), state=self._state(), error=self._error)

    def _state(self) -> TransferState:
        group, update = self._group, self._update
        if update is not None and update.committing:
            return "finishing"
        if group is None:
            return "no group"
        if not group.joined:
            return "joining"
        if group.receiving:
            return "receiving"
        return "started" if update is not None and update.finishing is None else "joined"

    async def init(self, init: TransferInit) -> None:
        """Join a trainer's group, and return once it is complete.

        Repeating the call awaits the same join. Once tensors were broadcast, or the trainer's store is gone, the caller
        is a restarted trainer, and a new group is joined. Raises WeightTransferFailed.
        """
        async with self._turn:
            if not await self._is_repeat(init):
                await self._leave_group("another trainer has taken its place")
                try:
                    self._group = Group(init, backend_here(), self._model.largest_tensor_bytes)
                except OSError as error:
                    raise self._failed(f"no receiver process can be started: {error}") from error
                self._error = None
            group = self._group
            assert group is not None
        try:
            await asyncio.shield(group.joining)
        except WeightTransferFailed as error:
            if self._group is group:
                self._group, self._error = None, error.message
            raise

    async def _is_repeat(self, init: TransferInit) -> bool:
        group = self._group
        if group is None or group.init != init or group.used:
            return False
        return not group.joining.done() or (group.joined and await group.receiver.trainer_is_there())

    async def start(self) -> None:
        """Lay out the next version. Repeating the call has no effect; an unfinished update with tensors is dropped.

        Raises WeightTransferFailed, InsufficientStorage, or LogCorrupt if replicas follow another log.
        """
        async with self._turn:
            group, update = self._joined_group(), self._update
            group.used = True
            if update is not None and update.committing:
                raise WeightTransferFailed(
                    f"version {update.staged.begin.version} is being committed: wait for its POST /finish_weight_update"
                )
            if group.receiving:
                raise WeightTransferFailed("tensors of the update before are being received: wait until they are")
            if update is not None and update.finishing is None:
                if not update.announced and update.failure is None and not update.staged.is_left:
                    return
                await self._versions.drop_broadcast(update.staged)
            # while no update was finished, an empty announcement can only mean the tables of a failed one
            failed = update.tables if update is not None and update.group is group else ()
            self._update = Update(await self._versions.begin_broadcast(), group, group.finished_tables or failed)
            self._error = None

    async def update(self, announced: object) -> None:
        """Receive tensors; returns once all have come. Repeating the call awaits the same reception.

        ``announced``: the JSON value of ``update_info``: ``TensorsToCome``, or a list with one entry for our single
        rank.

        Raises InvalidRequest if the number of bytes is unknown, InvalidManifest or WeightTransferFailed, and errors of
        converting earlier tensors.
        """
        announcement = await self._tensors(announced)
        async with self._turn:
            group = self._joined_group()
            update = self._update if self._update is not None and self._update.finishing is None else None
            is_repeat = not announcement.names
            try:
                tensors = _repeated(group, update, announcement) if is_repeat else announcement
            except InvalidRequest as error:
                await self._leave_group(error.message)
                raise
            last = group.last
            # a request that repeats the last one: no tensor comes twice in one update
            is_same = last is not None and (last.update, last.tensors) == (update, tensors)
            if last is None or not is_same or (update is None and last.task.done()):
                if group.receiving:
                    raise WeightTransferFailed("tensors of another POST /update_weights are being received")
                if update is not None:
                    update.tables.append(tensors)
                last = Reception(update, tensors, is_repeat, _task(self._receive(group, update, tensors)))
                group.last, group.used = last, True
        await asyncio.shield(last.task)

    async def _tensors(self, announced: object) -> TensorsToCome:
        if isinstance(announced, list) and len(announced) == 1:
            (announced,) = announced
        try:
            tensors: TensorsToCome = fail_fast_validator(TensorsToCome).validate_python(announced)
            ignored, limit = self._model.ignored, self._model.largest_tensor_bytes
            named = zip(tensors.names, tensors.sizes, strict=True)
            largest = max((size for name, size in named if not ignored.may_have(name, size, limit)), default=0)
            if not largest:
                return tensors
            refused: RolloutServiceError = InvalidRequest(
                f"POST /update_weights announces a tensor of {largest} bytes, and none of the served model's has more "
                f"than {limit} in any dtype",
                {"nbytes": largest, "limit_bytes": limit},
            )
        except ValidationError as error:
            refused = validation_error("POST /update_weights: update_info", error.errors())
        async with self._turn:  # leave the group: a trainer that broadcasts nevertheless must not wait forever
            await self._leave_group(refused.message)
        raise refused

    async def _receive(self, group: Group, update: Update | None, tensors: TensorsToCome) -> None:
        try:
            if update is None:
                await group.receiver.receive(tensors, lambda *_: None)
                raise WeightTransferFailed(
                    "no weight update was started, and what was broadcast is dropped: POST /start_weight_update first"
                )
            self._announce(update, tensors)
            await group.receiver.receive(tensors, update.convert)
        except WeightTransferFailed as error:
            self._error = error.message
            if update is not None:
                await self._lose(update, error)
            if not group.receiver.alive and self._group is group:
                self._group = None
            raise
        failure = update.failure or update.staged.failure
        if failure is not None:
            self._error = failure.message
            await self._lose(update, failure)
            raise failure

    async def _lose(self, update: Update, why: RolloutServiceError) -> None:
        """Mark the update as failed and drop it: its trainer may never return, and its number becomes free at once."""
        update.failure = update.failure or why
        await self._versions.drop_broadcast(update.staged)

    def _announce(self, update: Update, tensors: TensorsToCome) -> None:
        """Record the announced tensors. If they do not fit the model, the update fails, but its tensors are
        received."""
        try:
            ignored = self._model.ignored
            if left_out := ignored.summary(tensors.names):
                logger.info("version %d: %s", update.staged.begin.version, left_out)
            new = tuple(_upload_tensors(tensors, ignored))
            again = sorted({tensor.name for tensor in new} & update.announced.keys())
            if again or len({tensor.name for tensor in new}) < len(new):
                raise InvalidManifest(f"tensors came twice in one update: {', '.join(again[:4]) or 'in one request'}")
            self._model.check_table(new, self._plan, whole=False)
            update.announced |= {tensor.name: tensor for tensor in new}
        except InvalidManifest as error:
            update.failure = update.failure or error

    async def finish(self, label: str | None) -> WeightStatus:
        """Commit the broadcast; returns once every live replica serves it. Repeating the call awaits the same commit.

        ``label``: the version's number, if it is an integer above the newest one.

        Raises WeightTransferFailed, InvalidManifest for missing tensors, VersionConflict, CommitTimeout,
        InsufficientStorage, and errors of converting tensors.
        """
        async with self._turn:
            update = self._update
            if update is None:
                raise WeightTransferFailed("no weight update was started: POST /start_weight_update first")
            if self._group is not None and self._group.receiving:
                raise WeightTransferFailed("the update's tensors are still being received: finish it when they are")
            finishing = update.finishing
            done = finishing is not None and finishing.done() and not finishing.cancelled()
            if finishing is None or (done and isinstance(finishing.exception(), CommitTimeout)):
                finishing = update.finishing = _task(self._finish(update, label))
        return await asyncio.shield(finishing)

    async def _finish(self, update: Update, label: str | None) -> WeightStatus:
        try:
            if update.failure is not None:
                raise update.failure
            self._model.check_table(tuple(update.announced.values()), self._plan)
            status = await self._versions.commit_broadcast(update.staged, label)
            update.group.finished_tables = update.tables
            return status
        except CommitTimeout:
            raise  # it is committed, and replicas keep trying
        except RolloutServiceError as error:
            await self._versions.drop_broadcast(update.staged)
            self._error = error.message
            if error.http_status < 500 or isinstance(error, InsufficientStorage):
                raise
            raise WeightTransferFailed(error.message, error.detail) from error

    async def shutdown(self) -> None:
        """Leave the group, and drop an unfinished update."""
        async with self._turn:
            group = self._group
            if group is not None and group.joined and not group.receiving:
                self._group = None
                await group.receiver.leave()
            await self._leave_group("the transfer was shut down")

    async def stop(self) -> None:
        """Kill the receiver, because the ingest ends."""
        group, self._group = self._group, None
        if group is not None:
            await group.receiver.kill("the ingest ends")

    def _joined_group(self) -> Group:
        if self._group is None:
            why = "" if self._error is None else f" (the last one failed: {self._error})"
            raise WeightTransferFailed(f"no trainer's group is joined: POST /init_weight_transfer_engine first{why}")
        if not self._group.joined:
            raise WeightTransferFailed("the trainer's group is being joined still: wait for its answer")
        return self._group

    async def _leave_group(self, why: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.receiver.kill(why)
        update = self._update
        if update is not None and update.finishing is None:
            await self._lose(update, update.failure or self._failed(f"the weight update was given up: {why}"))

    def _failed(self, why: str) -> WeightTransferFailed:
        self._error = why
        return WeightTransferFailed(why)


def _repeated(group: Group, update: Update | None, announcement: TensorsToCome) -> TensorsToCome:
    """Return the table that an empty ``announcement`` stands for. Raises InvalidRequest if there is none.

    The first request of a round repeats the first of the round before, the second the second. vLLM's trainer engine
    sends one request per round.
    """
    last, tables = group.last, group.finished_tables if update is None else update.repeatable
    place = 0 if update is None else len(update.tables)
    if last is not None and last.update is update and last.is_repeat and (group.receiving or place >= len(tables)):
        return last.tensors  # its reply was lost, and the trainer has sent it again
    if place < len(tables):
        return announcement.as_before(tables[place])
    had = "this group has had none" if not tables else f"that round had {len(tables)}"
    raise InvalidRequest(
        f"POST /update_weights: names is empty, so request {place + 1} of this round repeats the tensors of the round "
        f"before, and {had}. The group is left: POST /init_weight_transfer_engine, and send names, dtype_names and "
        "shapes in the first round"
    )


def _upload_tensors(tensors: TensorsToCome, ignored: IgnoredTensors) -> Iterator[UploadTensor]:
    for name, dtype, shape in zip(tensors.names, tensors.dtype_names, tensors.shapes, strict=True):
        if name in ignored:
            continue
        if not name or dtype not in get_args(SourceDtype):
            raise InvalidManifest(
                f"{name!r} is {dtype}; the ingest takes {', '.join(get_args(SourceDtype))} and quantizes itself",
                {"tensor": name, "dtype": dtype},
            )
        yield UploadTensor.model_validate({"name": name, "dtype": dtype, "shape": shape})


def _task(work: Coroutine[object, None, _Result]) -> asyncio.Task[_Result]:
    """Run ``work`` independently of its waiters; each waiter gets its failure."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task
