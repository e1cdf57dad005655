"""Pushes of what has changed since this client's last push. See ``rollout_service.protocol.upload`` and ``.delta``.

Whether the client and the service still mean the same base is never assumed: the delta names it by the digests of its
tensors, and each changed tensor by the digest of the result. Where the service does not have that base, all is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import httpx

from rollout_service.client._delta_parts import PartsAsMade
from rollout_service.client._laps import Laps
from rollout_service.client._parts import cut_parts
from rollout_service.client._pieces import CONVERTED_BYTES
from rollout_service.client._sent_weights import LARGEST_SHARE, Changes, SentWeights, nbytes_of, prepare
from rollout_service.client._tensors import Progress, TensorSource, TensorThread, every_rank_gathers
from rollout_service.client._upload import Cut, PartSender, Uploader, announcement, staged_still
from rollout_service.errors import (
    CommitTimeout,
    DeltaBaseGone,
    InvalidDelta,
    NotFound,
    QuantizationError,
    RolloutServiceError,
)
from rollout_service.memory import memory
from rollout_service.model.convert import Named
from rollout_service.protocol.base import NewVersion
from rollout_service.protocol.upload import Announcement, CommitUpload, UploadTensor
from rollout_service.protocol.weights import WeightStatus
from rollout_service.quant.verdicts import Verdicts

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("rollout_service.client")


_ALL_IS_SENT = "the whole version is sent, because the service does not take its changes: %s"


@dataclass(frozen=True, slots=True)
class Push:
    """One push, and how its bytes go to the service."""

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
        committed: Callable[[int], None],
    ) -> WeightStatus:
        """Upload and commit. ``committed``: see ``commit_sent``."""
        number, sent = await self.uploader.send_stream(
            announced, cut, self.thread, parallel_parts=self.parallel_parts, progress=self.progress
        )
        self.laps.end("send")
        status = await self.commit_sent(number, sent, committed)
        self.laps.end("commit")
        return status

    async def commit_sent(self, number: int, sent: str, committed: Callable[[int], None]) -> WeightStatus:
        """Commit what was uploaded and hashes to ``sent``.

        ``committed`` is called with the version's number, also if replicas are late.
        """
        try:
            status = await self.uploader.commit(number, self.commit.model_copy(update={"upload_digest": sent}))
        except CommitTimeout:
            committed(number)
            raise
        committed(number)
        return status


class DeltaPushes:
    """All pushes of one client that may be deltas, one after the other. Keeps what was sent last."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._sent: SentWeights | None = None
        """None also while its bytes are being changed: whoever is interrupted then leaves nothing behind."""
        self._applying: Future[None] | None = None
        """To what is kept, the changes that were committed last: while the trainer computes."""
        self._preparing: Future[None] | None = None
        """Of what the second push needs, while the first one is sent."""
        self._too_large = False
        """Whether more has changed, in some push, than is sent as a delta."""

    def are_worth_it(self, table: tuple[UploadTensor, ...]) -> bool:
        """Whether a push of tensors with this table is better a delta, if nobody has said so.

        It is not if more than ``LARGEST_SHARE`` of the bytes has changed in one before: what is kept is let go of then.
        Nor is it if keeping them would take more than half of the memory that the host has left.
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
        """Send what ``source`` changes, or all of it. Raises as ``RolloutClient.push_weights``."""
        async with self._turn, every_rank_gathers(source, push.thread) as gathering:
            if self._preparing is None:
                self._preparing = _in_thread("delta-prepare", partial(prepare, source.gpu))
                self._preparing.add_done_callback(_warn_if_failed)
            converter, table = await push.uploader.quantizing(source.table, push.thread, CONVERTED_BYTES)
            announced = announcement(version, tensors=table, kv_scales=kv_scales, label=label)
            tensors = gathering.begin(own_memory=True)
            await self.settled()
            sent, self._sent = self._sent, None
            if sent is not None:
                await push.thread.call(sent.become_newer, version)
            if sent is None or not sent.may_be_base_of(version, table):
                sent = sent if sent is not None and sent.table == table else SentWeights(table)
                stored = converter.convert(tensors, to_cpu=False)
                return await self._push_whole(push, announced, sent, sent.take(stored, push.laps))
            self._sent = sent  # as it was, until something of it is changed
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
            verdicts = Verdicts()
            stored = converter.convert(tensors, to_cpu=False, verdicts=verdicts)
            status = await self._push_changes(push, sender, sent, stored, verdicts)
            return status or await self._push_whole(push, announced, sent, sent.stream())

    async def settled(self) -> None:
        """Wait until nothing changes what is kept. Who is cancelled leaves it to whoever asks next."""
        if (applying := self._applying) is None:
            return
        waited_for = asyncio.wrap_future(applying)
        await asyncio.wait([waited_for])
        error = waited_for.exception()
        if self._applying is applying:
            self._applying = None
            if error is not None:
                logger.warning("the next push sends all, since what was sent last could not be kept: %r", error)

    def _apply_newer(self, sent: SentWeights) -> None:
        self._applying = _in_thread("delta-base", sent.apply_newer)

    async def _push_changes(
        self, push: Push, sender: PartSender, sent: SentWeights, stored: Iterable[Named], verdicts: Verdicts
    ) -> WeightStatus | None:
        """Send what ``stored`` changes while it is compared, and commit.

        None if it is not sent as a delta: ``sent`` are the new weights then, and no version.
        """
        parts = PartsAsMade()
        sending = asyncio.create_task(sender.send(parts, push.parallel_parts))
        changes = await self._compared(
            push, sender, sent, sending, partial(sent.changes_to, stored, verdicts, parts.add)
        )
        if changes is None:
            return None
        parts.end()
        push.laps.end("compare")
        self._sent = sent  # as it was, until another push is begun

        def committed(number: int) -> None:
            sent.note_newer(number, changes)
            self._apply_newer(sent)

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
        await _discard(push, sender)
        await push.thread.call(sent.change, changes)
        return None

    async def _compared(
        self,
        push: Push,
        sender: PartSender,
        sent: SentWeights,
        sending: asyncio.Task[str],
        compare: Callable[[], Changes | None],
    ) -> Changes | None:
        """See ``SentWeights.changes_to``. If there are none to be sent, nothing of them stays with the service.

        Weights that cannot be compared, such as NaN, leave ``sent`` what it was.
        """
        base = sent.version
        try:
            changes = await push.thread.call(compare)
        except asyncio.CancelledError:
            await _stopped(sending)
            raise
        except Exception as error:
            if sent.version is not None:
                self._sent = sent
            await _stopped(sending)
            if not await _discard(push, sender) and isinstance(error, QuantizationError):
                raise staged_still(sender.version, error) from error
            raise
        if changes is None:
            self._too_large = True
            logger.info(
                "since version %s more than %g of all bytes have changed: the whole version is sent",
                base, LARGEST_SHARE,
            )  # fmt: skip
            await _stopped(sending)
            await _discard(push, sender)
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
        """``stream``: the bytes of ``sent``, which is the base of the next push once it is committed."""

        def committed(number: int) -> None:
            sent.version, self._sent = number, sent

        # what is kept stays what it is until the next push
        status = await push.send(announced, partial(cut_parts, stream, held=True), committed)
        logger.info("all %d bytes of version %d were pushed in %s", sent.nbytes, status.version, push.laps)
        return status


def _in_thread(name: str, work: Callable[[], None]) -> Future[None]:
    thread = ThreadPoolExecutor(1, name)
    future = thread.submit(work)
    thread.shutdown(wait=False)  # it ends with this work
    return future


def _warn_if_failed(preparing: Future[None]) -> None:
    if (error := preparing.exception()) is not None:
        logger.warning("the second push compiles its kernels, which failed while the first was sent: %r", error)


async def _stopped(sending: asyncio.Task[str]) -> None:
    """Send no more; what it raised meanwhile does not matter."""
    sending.cancel()
    await asyncio.wait([sending])
    if not sending.cancelled():
        sending.exception()


async def _discard(push: Push, sender: PartSender) -> bool:
    """Drop what this push has staged; False if that is not known to be gone, or somebody had sent some of it before."""
    if not sender.found_nothing:
        return False
    try:
        await push.uploader.discard(sender.version)
    except NotFound:
        pass
    except (httpx.TransportError, RolloutServiceError) as error:
        logger.warning("version %d stays staged with a part of its changes: %s", sender.version, error)
        return False
    return True
