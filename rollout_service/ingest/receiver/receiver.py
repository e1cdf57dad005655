"""The ingest's side of a receiver process."""

import asyncio
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import NoReturn, TypeAlias

import torch

from rollout_service.errors import WeightTransferFailed
from rollout_service.ingest.receiver.process import (
    Failed,
    Filled,
    Free,
    FromProcess,
    Join,
    Pipe,
    Receive,
    Signal,
    ToProcess,
    TrainerThere,
    run,
)
from rollout_service.ingest.sources.source import as_tensor
from rollout_service.protocol.ignored import IGNORED_BYTES
from rollout_service.protocol.ring import aligned
from rollout_service.protocol.weight_transfer import TensorsToCome, TransferBackend, TransferInit
from rollout_service.runtime.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
JOIN_TIMEOUT_S = 360.0
"""Timeout in seconds, slightly above those of the links, so that their own errors are reported."""
SILENCE_TIMEOUT_S = 330.0
"""Maximum time in seconds without a broadcast while tensors are expected; also above gloo's own timeout."""
ANSWER_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0

Read: TypeAlias = Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]]
Convert: TypeAlias = Callable[[Sequence[str], Read], Future[None] | None]
"""Begins to use the tensors of these names, which ``read`` yields; returns None if it does not need them."""


def backend_here() -> TransferBackend:
    """Return the backend of receivers that this process starts."""
    return "nccl" if torch.cuda.is_available() else "gloo"


class Receiver:
    """One process, which is one rank of one group. Lives in the ingest's event loop.

    Call ``join``, ``receive`` and ``trainer_is_there`` one after the other. If one fails, it raises
    WeightTransferFailed, and the process is killed.
    """

    def __init__(self, largest_tensor_bytes: int = 0) -> None:
        """Start the process. ``largest_tensor_bytes``: size of the largest tensor that is stored. Raises OSError."""
        # a tensor that is left out passes through the memory, too
        self._memory = SharedMemory.create(max(IGNORED_BYTES, aligned(largest_tensor_bytes)))
        self._messages: asyncio.Queue[FromProcess | None] = asyncio.Queue()
        self._in_use: deque[Future[None] | None] = deque()
        self._why_ended: str | None = None
        self._pipe, theirs = CONTEXT.Pipe()
        # start it from the event loop's thread: the kernel treats the end of the starting thread as the death of the
        # parent
        memory = os.getpid(), self._memory.descriptor, self._memory.name
        self._process = CONTEXT.Process(target=run, args=(theirs, *memory), name="weight-receiver", daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()
        listen = (self._pipe, asyncio.get_running_loop(), self._messages)
        threading.Thread(target=_listen, args=listen, name="weight-receiver", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return False once the process has failed, or was asked to end."""
        return self._why_ended is None

    async def join(self, init: TransferInit, backend: TransferBackend) -> None:
        """Become a rank of the trainer's group."""
        self._send(Join(init, backend))
        message = await self._next(JOIN_TIMEOUT_S, "the group was not there")
        assert message is Signal.JOINED, message

    async def receive(self, tensors: TensorsToCome, convert: Convert) -> None:
        """Receive the broadcasts of these tensors. Returns once all have come; some may not be converted yet.

        ``convert`` is called for a few tensors at a time, which stay in memory until its future is done.
        """
        self._send(Receive(tensors))
        while (message := await self._next(SILENCE_TIMEOUT_S, "nothing was broadcast")) is not Signal.RECEIVED:
            assert isinstance(message, Filled), message
            self._hand_on(message, tensors, convert)

    async def trainer_is_there(self) -> bool:
        """Return True if the trainer still serves the group's store, or if there is no store."""
        try:
            self._send(Signal.ASK_TRAINER)
            message = await self._next(ANSWER_TIMEOUT_S, "no answer came")
        except WeightTransferFailed:
            return False
        assert isinstance(message, TrainerThere), message
        return message.there is not False

    async def leave(self) -> None:
        """Leave the group and end the process, by killing it if necessary."""
        if self._send(Signal.LEAVE):
            await asyncio.to_thread(self._process.join, END_TIMEOUT_S)
        await self.kill("it was told to leave the group")

    async def kill(self, why: str) -> None:
        """End the process now. Waiting callers get ``why``; tensors that were forwarded stay valid."""
        self._why_ended = self._why_ended or why
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._memory.close()

    def _hand_on(self, filled: Filled, tensors: TensorsToCome, convert: Convert) -> None:
        where = {tensors.names[place]: (place, start) for place, start in filled.tensors}
        memory = self._memory.view

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
            self._send(Free(batches))

    def _send(self, message: ToProcess) -> bool:
        """Return False if the process has ended. Whoever waits for its answer gets the error."""
        try:
            self._pipe.send(message)
        except OSError:
            return False
        return True

    async def _next(self, timeout_s: float, what: str) -> FromProcess:
        while self._why_ended is None:
            try:
                message = await asyncio.wait_for(self._messages.get(), timeout_s)
                break
            except TimeoutError:
                if self._in_use:  # the process may be waiting for memory, not for the trainer
                    continue
                await self._fail(f"{what} for {timeout_s:g} s: the trainer has gone, or waits for another rank")
        else:
            raise self._failed(self._why_ended)
        if message is None:
            await asyncio.to_thread(self._process.join, END_TIMEOUT_S)  # its pipe is closed, so it is ending
            await self._fail(f"the receiver process {self.pid} ended with exit code {self._process.exitcode}")
        if isinstance(message, Failed):
            await self._fail(message.reason)
        return message

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
    except RuntimeError:  # the event loop is closed
        return
    finally:
        pipe.close()
