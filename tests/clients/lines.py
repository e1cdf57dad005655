"""A client in a process of its own, with its own packages on the path, whose methods a test calls.

Lines of JSON: ``[number, method, arguments, named arguments]`` on its stdin, ``[number, reply, error]`` on a pipe when
it is done. The client's side, ``answer``, imports nothing beyond the standard library.
"""

import asyncio
import inspect
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
LONGEST_LINE_BYTES = 16 << 20


class ClientError(RuntimeError):
    """What the client raised: the name of its class, and its message."""


class ClientProcess:
    """The test's side. ``call`` may be awaited many times at once."""

    def __init__(self, requests: asyncio.StreamWriter, replies: asyncio.StreamReader) -> None:
        self._requests, self._numbers = requests, itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self.reading = asyncio.create_task(self._read(replies))

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The reply of ``method``, such as ``rollouts.generate``. Raises ClientError."""
        if self.reading.done():
            raise ClientError("the client's process has ended")
        number = next(self._numbers)
        answered = self._pending[number] = asyncio.get_running_loop().create_future()
        self._requests.write(json.dumps([number, method, arguments, named]).encode() + b"\n")
        return await answered

    def in_thread(self, method: str) -> Callable[..., Any]:
        """``call`` of that method for code that blocks its thread, which is not the loop's."""
        loop = asyncio.get_running_loop()
        return lambda *given: asyncio.run_coroutine_threadsafe(self.call(method, *given), loop).result()

    async def _read(self, replies: asyncio.StreamReader) -> None:
        async for line in replies:
            number, reply, error = json.loads(line)
            answered = self._pending.pop(number)
            if error is None:
                answered.set_result(reply)
            else:
                answered.set_exception(ClientError(error))
        for unanswered in self._pending.values():
            if not unanswered.done():  # the test may have been cancelled
                unanswered.set_exception(ClientError("the client's process has ended, and said why"))


@asynccontextmanager
async def client_process(module: str, *arguments: str, path: Sequence[Path] = ()) -> AsyncIterator[ClientProcess]:
    """``python -m MODULE REPLIES ARGUMENTS``, which ends with ``answer(REPLIES, …)``; ``path``: its packages."""
    readable, writable = os.pipe()
    with open(readable, "rb") as pipe:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(writable), *arguments),
            cwd=PROJECT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [PROJECT, *path]))},  # noqa: TID251
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[writable],
        )
        os.close(writable)
        replies = asyncio.StreamReader(LONGEST_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(replies), pipe)
        assert process.stdin is not None
        client = ClientProcess(process.stdin, replies)
        try:
            yield client
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await client.reading


def answer(replies: str, objects: Mapping[str, Any]) -> None:
    """The client's side: call ``NAME.METHOD`` of these objects as lines ask for it, many at once, until there are none.

    ``replies``: the pipe. A method that is no coroutine runs in a thread.
    """
    with open(int(replies), "w", buffering=1) as pipe:
        asyncio.run(_answer(objects, lambda told: pipe.write(json.dumps(told) + "\n")))


async def _answer(objects: Mapping[str, Any], tell: Callable[[list[Any]], object]) -> None:
    async def one(number: int, method: str, arguments: list[Any], named: dict[str, Any]) -> None:
        name, _, method = method.partition(".")
        function = getattr(objects[name], method)
        try:
            if inspect.iscoroutinefunction(function):
                tell([number, await function(*arguments, **named), None])
            else:
                tell([number, await asyncio.to_thread(function, *arguments, **named), None])
        except Exception as error:  # noqa: BLE001 - the test is told of it
            tell([number, None, f"{type(error).__name__}: {error}"])

    async with asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(one(*json.loads(line)))
