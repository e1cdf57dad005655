"""Push the changes since this client's last push. See ``rollout_service.protocol.upload`` and ``.delta``.

The client never assumes that the service has the same base. A delta names its base by the digests of all tensors, and
each changed tensor by its new digest. If the service does not have that base, the client sends the whole version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rollout_service.client._delta_parts import PartsAsMade
from rollout_service.client._laps import Laps
from rollout_service.client._part_sender import PartSender
from rollout_service.client._parts import cut_parts
from rollout_service.client._pieces import CONVERTED_BYTES
from rollout_service.client._sent_weights import LARGEST_SHARE, Changes, SentWeights, nbytes_of, prepare
from rollout_service.client._tensors import Progress, TensorSource, TensorThread, every_rank_gathers
from rollout_service.client._upload import Cut, Uploader, announcement, staged_still
from rollout_service.errors import (
    CommitTimeout,
    DeltaBaseGone,
    InvalidDelta,
    QuantizationError,
    VersionConflict,
)
from rollout_service.model.convert import Named
from rollout_service.protocol.base import NEXT, NewVersion
from rollout_service.protocol.upload import Announcement, CommitUpload, Delta, UploadTensor
from rollout_service.protocol.weights import WeightStatus
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.memory import memory

if TYPE_CHECKING:
    import torch

    from rollout_service.model.convert import Converter

logger = logging.getLogger("rollout_service.client")


_ALL_IS_SENT = "the whole version is sent, because the service does not take its changes: %s"


@dataclass(frozen=True, slots=True)
class Push:
    """One push: its uploader, its thread and its options."""

    uploader: Uploader
    thread: TensorThread
    commit: CommitUpload
    parallel_parts: int
    progress: Progress | None
    laps: Laps = field(default_factory=Laps)

    async def send(
        self,
        announced: Announcement,
        cut: Cut,
        committed: Callable[[int, str], None],
    ) -> WeightStatus:
        """Upload and commit the version. ``committed``: see ``commit_sent``."""
        number, sent = await self.uploader.send_stream(
            announced, cut, self.thread, parallel_parts=self.parallel_parts, progress=self.progress
        )
        self.laps.end("send")
        status = await self.commit_sent(number, sent, committed)
        self.laps.end("commit")
        return status

    async def commit_sent(self, number: int, sent: str, committed: Callable[[int, str], None]) -> WeightStatus:
        """Commit an upload whose digest is ``sent``.

        ``committed`` is called with the version's number and ``sent``, even if replicas do not serve it in time.
        """
        try:
            status = await self.uploader.commit(number, self.commit.model_copy(update={"upload_digest": sent}))
        except CommitTimeout:
            committed(number, sent)
            raise
        committed(number, sent)
        return status


class _Pushed(NamedTuple):
    """The last committed push."""

    version: int
    delta: Delta | None
    """The announced delta; None if the whole version was sent."""
    upload_digest: str


class DeltaPushes:
    """Runs the delta pushes of one client one after the other, and keeps the last sent weights."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
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

    async def push(
        self,
        push: Push,
        version: NewVersion,
        source: TensorSource,
        label: str | None,
        kv_scales: dict[str, float] | None,
    ) -> WeightStatus:
        """Send the changes of ``source``, or the whole version. Raises the errors of ``RolloutClient.push_weights``."""
        async with self._turn, every_rank_gathers(source, push.thread) as gathering:
            if self._preparing is None:
                self._preparing = _in_thread("delta-prepare", partial(prepare, source.gpu))
                self._preparing.add_done_callback(_warn_if_failed)
            converter, table = await push.uploader.quantizing(source.table, push.thread, CONVERTED_BYTES)
            announced = announcement(version, tensors=table, kv_scales=kv_scales, label=label)
            tensors = gathering.begin(own_memory=True)
            await self.wait_until_settled()
            sent, self._sent = self._sent, None
            if sent is not None and sent.version == version:
                self._sent = sent
                if (again := await self._commit_again(push, announced, sent, converter, tensors)) is not None:
                    return again
            if sent is None or not sent.may_be_base_of(version, table):
                sent = sent if sent is not None and sent.table == table else SentWeights(table)
                stored = converter.convert(tensors, to_cpu=False)
                return await self._push_whole(push, announced, sent, sent.take(stored, push.laps))
            self._sent = sent  # unchanged until the comparison starts to modify it
            push.laps.end("settle")
            await asyncio.wait([asyncio.wrap_future(self._preparing)])
            push.laps.end("compile")
            of_base = announced.model_copy(update={"delta": sent.as_base()})
            try:
                sender = await push.uploader.open(of_base, push.progress)
            except DeltaBaseGone as error:
                logger.warning(_ALL_IS_SENT, error)
                self._sent = None
                stored = converter.convert(tensors, to_cpu=False)
                return await self._push_whole(push, announced, sent, sent.take(stored, push.laps))
            self._sent = None
            push.laps.end("announce")
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
        plan = await push.uploader.begin(announced.model_copy(update={"delta": pushed.delta}))
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
        return await push.uploader.commit(
            pushed.version, push.commit.model_copy(update={"upload_digest": pushed.upload_digest})
        )

    async def _push_changes(
        self, push: Push, sender: PartSender, sent: SentWeights, stored: Iterable[Named], checks: DeferredChecks
    ) -> WeightStatus | None:
        """Send the changes to ``stored`` while they are found, and commit them.

        Returns None if the changes are too large for a delta. ``sent`` then holds the new weights, without a version
        number.
        """
        base, parts = sent.as_base(), PartsAsMade()
        sending = asyncio.create_task(sender.send(parts, push.parallel_parts))
        changes = await self._compare(push, sender, sent, sending, partial(sent.changes_to, stored, checks, parts.add))
        if changes is None:
            return None
        parts.end()
        push.laps.end("compare")
        self._sent = sent  # unchanged until the next push begins

        def committed(number: int, digest: str) -> None:
            self._pushed = _Pushed(number, base, digest)
            # while the trainer computes
            self._applying = _in_thread("delta-base", partial(sent.become, number, changes))

        try:
            digest = await sending
            push.laps.end("send")
            status = await push.commit_sent(sender.version, digest, committed)
            push.laps.end("commit")
            logger.info("version %d was pushed as a delta in %s", sender.version, push.laps)
            return status
        except (DeltaBaseGone, InvalidDelta) as error:
            logger.warning(_ALL_IS_SENT, error)
        self._sent = None
        await push.thread.call(sent.change, changes)
        return None

    async def _compare(
        self,
        push: Push,
        sender: PartSender,
        sent: SentWeights,
        sending: asyncio.Task[str],
        compare: Callable[[], Changes | None],
    ) -> Changes | None:
        """Return the changes, see ``SentWeights.changes_to``; None if they are too large for a delta.

        If the new weights are invalid, such as NaN, ``sent`` stays unchanged.
        """
        base = sent.version
        try:
            changes = await push.thread.call(compare)
        except asyncio.CancelledError:
            await _cancel_sending(sending)
            raise
        except Exception as error:
            if sent.version is not None:
                self._sent = sent
            await _cancel_sending(sending)
            if isinstance(error, QuantizationError):
                raise staged_still(sender.version, error) from error
            raise
        if changes is None:
            self._too_large = True
            logger.info(
                "since version %s more than %g of all bytes have changed: the whole version is sent",
                base, LARGEST_SHARE,
            )  # fmt: skip
            await _cancel_sending(sending)
            return None
        logger.info("the changes since version %s have %d bytes of %d", base, nbytes_of(changes), sent.nbytes)
        return changes

    async def _push_whole(
        self,
        push: Push,
        announced: Announcement,
        sent: SentWeights,
        stream: Iterable[torch.Tensor],
    ) -> WeightStatus:
        """Send ``stream``, the bytes of ``sent``. Once committed, ``sent`` becomes the base of the next push."""

        def committed(number: int, digest: str) -> None:
            sent.version, self._sent, self._pushed = number, sent, _Pushed(number, None, digest)

        # the kept weights stay unchanged until the next push
        status = await push.send(announced, partial(cut_parts, stream, held=True), committed)
        logger.info("all %d bytes of version %d were pushed in %s", sent.nbytes, status.version, push.laps)
        return status


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
