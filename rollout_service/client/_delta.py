"""Push the changes since this client's last push. See ``rollout_service.protocol.upload`` and ``.delta``.

The client never assumes that the service has the same base. A delta names its base by the digests of all tensors, and
each changed tensor by its new digest. If the service does not have that base, the client sends the whole version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rollout_service.client._part_sender import PartSender
from rollout_service.client._parts import Part, cut_parts
from rollout_service.client._pieces import CONVERTED_BYTES
from rollout_service.client._push import Push, staged_still
from rollout_service.client._sent_weights import LARGEST_SHARE, Laps, SentWeights, nbytes_of, prepare
from rollout_service.client._tensors import every_rank_gathers
from rollout_service.client._upload import Uploader
from rollout_service.errors import CommitTimeout, DeltaBaseGone, InvalidDelta, QuantizationError, VersionConflict
from rollout_service.model.convert import Named
from rollout_service.protocol.base import NEXT
from rollout_service.protocol.upload import Announcement, Delta, UploadTensor
from rollout_service.protocol.weights import WeightStatus
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.memory import memory

if TYPE_CHECKING:
    import torch

    from rollout_service.model.convert import Converter

logger = logging.getLogger("rollout_service.client")


_ALL_IS_SENT = "the whole version is sent, because the service does not take its changes: %s"


class _Pushed(NamedTuple):
    """The last committed push."""

    version: int
    delta: Delta | None
    """The announced delta; None if the whole version was sent."""
    upload_digest: str


class DeltaPushes:
    """Runs the delta pushes of one client one after the other, and keeps the last sent weights."""

    def __init__(self, uploader: Uploader) -> None:
        self._uploader = uploader
        self._turn = asyncio.Lock()
        self._laps = Laps()
        """The times of the running push."""
        self._sent: SentWeights | None = None
        """The last sent weights. None while their bytes change, so that an interrupted push leaves no half-changed
        base."""
        self._pushed: _Pushed | None = None
        self._applying: Future[None] | None = None
        """The task that applies the last committed changes to the kept weights, while the trainer computes."""
        self._preparing: Future[None] | None = None
        """The task that compiles the kernels of the second push, while the first push is sent."""
        self._too_large = False
        """True if a push has changed more than a delta may contain."""

    def are_worth_it(self, table: tuple[UploadTensor, ...]) -> bool:
        """Return True if pushes with this table should be deltas, when the caller has not decided.

        The answer is False after a push that changed more than ``LARGEST_SHARE`` of the bytes; the kept weights are
        then freed. It is also False if keeping the weights would take more than half of the free host memory.
        """
        if self._too_large:
            self._sent = None
            return False
        return self._sent is not None or sum(tensor.nbytes for tensor in table) <= memory().free_bytes / 2

    async def push(self, push: Push) -> WeightStatus:
        """Send the changes, or the whole version. Raises the errors of ``RolloutClient.push_weights``."""
        source, laps = push.source, Laps()
        async with self._turn, every_rank_gathers(source, push.thread):
            self._laps = laps  # its first phase has the wait for the turn
            if self._preparing is None:
                self._preparing = _in_thread("delta-prepare", partial(prepare, source.gpu))
                self._preparing.add_done_callback(_warn_if_failed)
            converter, table = await self._uploader.quantizing(source.table, push.thread, CONVERTED_BYTES)
            announced = push.announce(tensors=table)
            tensors = source.begin(own_memory=True)
            await self.wait_until_settled()
            sent, self._sent = self._sent, None
            if sent is not None and sent.version == announced.version:
                self._sent = sent
                if (again := await self._commit_again(push, announced, sent, converter, tensors)) is not None:
                    return again
            if sent is None or not sent.may_be_base_of(announced.version, table):
                sent = sent if sent is not None and sent.table == table else SentWeights(table)
                stored = converter.convert(tensors, to_cpu=False)
                return await self._push_whole(push, announced, sent, sent.take(stored, self._laps))
            self._sent = sent  # unchanged until the comparison starts to modify it
            self._laps.end("settle")
            await asyncio.wait([asyncio.wrap_future(self._preparing)])
            self._laps.end("compile")
            try:
                sender = await self._uploader.open(push, announced.model_copy(update={"delta": sent.as_base()}))
            except DeltaBaseGone as error:
                logger.warning(_ALL_IS_SENT, error)
                self._sent = None
                stored = converter.convert(tensors, to_cpu=False)
                return await self._push_whole(push, announced, sent, sent.take(stored, self._laps))
            self._sent = None
            self._laps.end("announce")
            checks = DeferredChecks()
            stored = converter.convert(tensors, to_cpu=False, checks=checks)
            status = await self._push_changes(push, sender, sent, stored, checks)
            return status or await self._push_whole(push, announced, sent, sent.stream())

    async def wait_until_settled(self) -> None:
        """Wait until no task changes the kept weights. A cancelled wait leaves the task to the next caller."""
        if (applying := self._applying) is None:
            return
        waited_for = asyncio.wrap_future(applying)
        await asyncio.wait([waited_for])
        error = waited_for.exception()
        if self._applying is applying:
            self._applying = None
            if error is not None:
                logger.warning("the next push sends all, since what was sent last could not be kept: %r", error)

    async def _commit_again(
        self,
        push: Push,
        announced: Announcement,
        sent: SentWeights,
        converter: Converter,
        tensors: Iterable[Named],
    ) -> WeightStatus | None:
        """Commit the last pushed version again if the weights are the same. Return None if the service has lost it.

        Raises VersionConflict for other weights.
        """
        pushed = self._pushed
        assert pushed is not None and pushed.version == announced.version, "sent has its number"
        plan = await self._uploader.begin(announced.model_copy(update={"delta": pushed.delta}))
        self._sent = None
        if plan.state != "committed":
            return None
        checks = DeferredChecks()
        stored = converter.convert(tensors, to_cpu=False, checks=checks)
        changes = await push.thread.call(sent.changes_to, stored, checks)
        self._sent = sent
        if changes is None or nbytes_of(changes):
            raise VersionConflict(
                f"version {pushed.version} was pushed with other weights: push the changed ones as a newer version, "
                f"such as {NEXT!r}",
                {"version": pushed.version},
            )
        if push.progress is not None:
            push.progress(sent.nbytes, sent.nbytes)
        return await self._uploader.commit(pushed.version, push.commit_of(pushed.upload_digest))

    async def _push_changes(
        self, push: Push, sender: PartSender, sent: SentWeights, stored: Iterable[Named], checks: DeferredChecks
    ) -> WeightStatus | None:
        """Send the changes to ``stored`` while they are found, and commit them.

        Returns None if the changes are too large for a delta. ``sent`` then holds the new weights, without a version
        number. If the new weights are invalid, such as NaN, ``sent`` stays unchanged.
        """
        base, parts = sent.as_base(), _PartsAsMade()
        sending = asyncio.create_task(sender.send(parts, push.parallel_parts))
        try:
            changes = await push.thread.call(sent.changes_to, stored, checks, parts.add)
        except (Exception, asyncio.CancelledError) as error:
            if sent.version is not None and not isinstance(error, asyncio.CancelledError):
                self._sent = sent
            await _cancel_sending(sending)
            if isinstance(error, QuantizationError):
                raise staged_still(sender.plan.version, error) from error
            raise
        if changes is None:
            self._too_large = True
            logger.info(
                "since version %s more than %g of all bytes have changed: the whole version is sent",
                base.base, LARGEST_SHARE,
            )  # fmt: skip
            await _cancel_sending(sending)
            return None
        logger.info("the changes since version %s have %d bytes of %d", base.base, nbytes_of(changes), sent.nbytes)
        parts.add(None)
        self._laps.end("compare")
        self._sent = sent  # unchanged until the next push begins

        def committed(number: int, digest: str) -> None:
            self._pushed = _Pushed(number, base, digest)
            # while the trainer computes
            self._applying = _in_thread("delta-base", partial(sent.become, number, changes))

        try:
            digest = await sending
            self._laps.end("send")
            status = await self._commit(push, sender.plan.version, digest, committed)
            logger.info("version %d was pushed as a delta in %s", status.version, self._laps)
            return status
        except (DeltaBaseGone, InvalidDelta) as error:
            logger.warning(_ALL_IS_SENT, error)
        self._sent = None
        await push.thread.call(sent.change, changes)
        return None

    async def _push_whole(
        self, push: Push, announced: Announcement, sent: SentWeights, stream: Iterable[torch.Tensor]
    ) -> WeightStatus:
        """Send ``stream``, the bytes of ``sent``. Once committed, ``sent`` becomes the base of the next push."""

        def committed(number: int, digest: str) -> None:
            sent.version, self._sent, self._pushed = number, sent, _Pushed(number, None, digest)

        # the kept weights stay unchanged until the next push
        number, digest = await self._uploader.send_stream(push, announced, partial(cut_parts, stream, held=True))
        self._laps.end("send")
        status = await self._commit(push, number, digest, committed)
        logger.info("all %d bytes of version %d were pushed in %s", sent.nbytes, status.version, self._laps)
        return status

    async def _commit(
        self, push: Push, number: int, digest: str, committed: Callable[[int, str], None]
    ) -> WeightStatus:
        """Commit an upload. ``committed`` is called even if replicas do not serve the version in time."""
        try:
            status = await self._uploader.commit(number, push.commit_of(digest))
        except CommitTimeout:
            committed(number, digest)
            raise
        committed(number, digest)
        self._laps.end("commit")
        return status


class _PartsAsMade:
    """A queue that carries parts from the comparing threads to the event loop that created this object."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue()

    def add(self, part: Part | None) -> None:
        """Append a part, or the end. Thread-safe."""
        self._loop.call_soon_threadsafe(self._parts.put_nowait, part)

    async def __aiter__(self) -> AsyncIterator[Part]:
        while (part := await self._parts.get()) is not None:
            yield part


def _in_thread(name: str, work: Callable[[], None]) -> Future[None]:
    thread = ThreadPoolExecutor(1, name)
    future = thread.submit(work)
    thread.shutdown(wait=False)  # the thread ends with this work
    return future


def _warn_if_failed(preparing: Future[None]) -> None:
    if (error := preparing.exception()) is not None:
        logger.warning("the second push compiles its kernels, which failed while the first was sent: %r", error)


async def _cancel_sending(sending: asyncio.Task[str]) -> None:
    """Cancel the sending task and ignore its errors."""
    sending.cancel()
    await asyncio.wait([sending])
    if not sending.cancelled():
        sending.exception()
