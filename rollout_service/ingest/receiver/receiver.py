"""The ingest's side of a receiver process."""

import asyncio
import contextlib
import logging
import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NoReturn, TypeAlias

import torch

from rollout_service.errors import WeightTransferFailed
from rollout_service.ingest.receiver.messages import (
    AskTrainer,
    Failed,
    Filled,
    Free,
    FromProcess,
    Join,
    Joined,
    Leave,
    Pipe,
    Receive,
    Received,
    ToProcess,
    TrainerThere,
)
from rollout_service.ingest.receiver.process import run
from rollout_service.ingest.receiver.shared_memory import SharedMemory
from rollout_service.ingest.sources.source import as_tensor
from rollout_service.protocol.weight_transfer import TensorsToCome, TransferBackend, TransferInit
from rollout_service.ring import aligned

logger = logging.getLogger(__name__)

RING_BYTES = 512 << 20
"""Of the memory that receiver and ingest share; more only if a single tensor needs it."""
JOIN_TIMEOUT_S = 360.0
"""A little above what the links themselves allow, so that their errors are told."""
SILENCE_TIMEOUT_S = 330.0
"""How long a trainer may broadcast nothing while tensors of it are expected; above gloo's own limit likewise."""
ANSWER_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0

Read: TypeAlias = Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]]
Convert: TypeAlias = Callable[[Sequence[str], Read], Future[None] | None]
"""Begins to use the tensors of these names, which ``read`` gives; None: it does not want them."""


def backend_here() -> TransferBackend:
    """What a receiver that this process starts can speak."""
    return "nccl" if torch.cuda.is_available() else "gloo"


class Receiver:
    """One process, which is one rank of one group. Lives in the ingest's event loop.

    ``join``, ``receive`` and ``trainer_is_there`` come one after the other; what fails in them raises
    WeightTransferFailed, and the process is killed.
    """

    def __init__(self) -> None:
        """Start the process. Raises OSError."""
        self._memory = SharedMemory()
        self._messages: asyncio.Queue[FromProcess | None] = asyncio.Queue()
        self._in_use: deque[Future[None] | None] = deque()
        self._given_back = asyncio.Event()
        self._why_ended: str | None = None
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # by the thread of the event loop: to the kernel, the end of the thread that started it is its parent's death
        self._process = context.Process(target=run, args=(theirs, self._memory), name="weight-receiver", daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()
        listen = (self._pipe, asyncio.get_running_loop(), self._messages)
        threading.Thread(target=_listen, args=listen, name="weight-receiver", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it has failed, or was told to end."""
        return self._why_ended is None

    async def join(self, init: TransferInit, backend: TransferBackend) -> None:
        """Become a rank of the trainer's group."""
        self._send(Join(init, backend))
        message = await self._next(JOIN_TIMEOUT_S, "the group was not there")
        assert isinstance(message, Joined), message

    async def receive(self, tensors: TensorsToCome, convert: Convert) -> None:
        """Take the broadcasts of these tensors. Returns when all have come; some may not be converted yet.

        ``convert`` is called for a few tensors at a time; they lie in memory until its future is done.
        """
        ring_bytes = max([RING_BYTES, *map(aligned, tensors.sizes)])
        if ring_bytes > self._memory.nbytes:
            await self._nothing_in_use()
            self._memory.grow(ring_bytes)
        self._send(Receive(tensors, ring_bytes))
        while not isinstance(message := await self._next(SILENCE_TIMEOUT_S, "nothing was broadcast"), Received):
            assert isinstance(message, Filled), message
            self._hand_on(message, tensors, convert)

    async def trainer_is_there(self) -> bool:
        """Whether the trainer still serves the group's store; True if there is no store to ask."""
        try:
            self._send(AskTrainer())
            message = await self._next(ANSWER_TIMEOUT_S, "no answer came")
        except WeightTransferFailed:
            return False
        assert isinstance(message, TrainerThere), message
        return message.there is not False

    async def leave(self) -> None:
        """Leave the group and end, killed if need be."""
        with contextlib.suppress(WeightTransferFailed):
            self._send(Leave())
            await asyncio.to_thread(self._process.join, END_TIMEOUT_S)
        await self.kill("it was told to leave the group")

    async def kill(self, why: str) -> None:
        """End it now. Who waits for it is told ``why``; tensors that it has handed on stay valid."""
        self._why_ended = self._why_ended or why
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._memory.close()

    def _hand_on(self, filled: Filled, tensors: TensorsToCome, convert: Convert) -> None:
        where = {tensors.names[place]: (place, start) for place, start in filled.tensors}
        memory = self._memory.view()

        def read(wanted: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for name in wanted:
                place, start = where[name]
                yield name, as_tensor(memory, tensors.dtype_names[place], tensors.shapes[place], start)

        using = convert(list(where), read)
        self._in_use.append(using)
        if using is None:
            self._give_back()
        else:
            loop = asyncio.get_running_loop()
            using.add_done_callback(lambda _: loop.call_soon_threadsafe(self._give_back))

    def _give_back(self) -> None:
        batches = 0
        while self._in_use and (self._in_use[0] is None or self._in_use[0].done()):
            self._in_use.popleft()
            batches += 1
        if batches:
            self._given_back.set()
            with contextlib.suppress(WeightTransferFailed):  # whoever waits for it is told
                self._send(Free(batches))

    async def _nothing_in_use(self) -> None:
        while self._in_use:
            self._given_back.clear()
            await self._given_back.wait()

    def _send(self, message: ToProcess) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._failed(f"the receiver process {self.pid} has ended ({error})") from error

    async def _next(self, timeout_s: float, what: str) -> FromProcess:
        while self._why_ended is None:
            try:
                message = await asyncio.wait_for(self._messages.get(), timeout_s)
                break
            except TimeoutError:
                if self._in_use:  # it may be waiting for memory, not for the trainer
                    continue
                await self._fail(f"{what} for {timeout_s:g} s: the trainer has gone, or waits for another rank")
        else:
            raise self._failed(self._why_ended)
        if message is None:
            await self._fail(self._ending())
        if isinstance(message, Failed):
            await self._fail(message.reason)
        return message

    def _ending(self) -> str:
        self._process.join(END_TIMEOUT_S)  # its pipe is closed: it is ending
        return f"the receiver process {self.pid} ended with exit code {self._process.exitcode}"

    def _failed(self, reason: str) -> WeightTransferFailed:
        return WeightTransferFailed(f"{self._why_ended or reason}. Join again: POST /init_weight_transfer_engine")

    async def _fail(self, reason: str) -> NoReturn:
        failed = self._failed(reason)
        logger.warning("the receiver process %s is of no use any more: %s", self.pid, failed)
        await self.kill(reason)
        raise failed


def _listen(pipe: Pipe, loop: asyncio.AbstractEventLoop, messages: "asyncio.Queue[FromProcess | None]") -> None:
    message: FromProcess | None
    try:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):  # the process has ended
                message = None
            loop.call_soon_threadsafe(messages.put_nowait, message)
            if message is None:
                return
    except RuntimeError:  # the event loop is closed: nobody listens any more
        return
    finally:
        pipe.close()
