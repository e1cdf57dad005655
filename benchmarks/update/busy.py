"""A constant number of requests under way while something else is measured."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event

from rollout_service.client import RolloutClient
from rollout_service.client._generate import GenerateOptions

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256
_END_S = 60  # in which the rollouts under way end


@asynccontextmanager
async def busy(concurrent: int, request: Callable[[int], Awaitable[object]]) -> AsyncIterator[None]:
    """Keep so many requests under way until the block ends, and wait for those under way then."""
    stop = asyncio.Event()

    async def work(number: int) -> None:
        while not stop.is_set():
            await request(number)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrent):
            group.create_task(work(number))
        try:
            yield
        finally:
            stop.set()


@contextmanager
def rollouts(url: str, concurrent: int, adapter: str | None = None) -> Iterator["SynchronizedArray[int]"]:
    """Keep so many rollouts under way; yield the number of those that have ended and of those that were aborted.

    With an ``adapter``, all are streams, half of which name it. Raises RuntimeError if their process fails.
    """
    # a process of its own: in a trainer's the client would take the GIL from the threads of its push
    context = multiprocessing.get_context("spawn")
    begun, stop, counts = context.Event(), context.Event(), context.Array("q", 2)
    client = context.Process(target=_generate, args=(url, concurrent, adapter, begun, stop, counts), daemon=True)
    client.start()
    try:
        while not begun.wait(1):
            _require_alive(client.is_alive(), client.exitcode)
        yield counts
        _require_alive(client.is_alive(), client.exitcode)
    finally:
        if client.is_alive():  # set() would wait forever for a process that died while it waited for the event
            stop.set()
        client.join(_END_S)
        client.terminate()


def _require_alive(is_alive: bool, code: int | None) -> None:
    if not is_alive:
        raise RuntimeError(f"the process that asks for rollouts has ended with code {code}")


def _generate(
    url: str, concurrent: int, adapter: str | None, begun: Event, stop: Event, counts: "SynchronizedArray[int]"
) -> None:
    async def run() -> None:
        async with RolloutClient(url) as client:

            async def request(number: int) -> None:
                options: GenerateOptions = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
                prompt = [10 + (number + i) % 90 for i in range(PROMPT_TOKENS)]  # the tiny model has 128 tokens
                if adapter is None:
                    rollout = await client.generate(prompt, **options)
                else:
                    options["adapter"] = adapter if number % 2 else None
                    async with client.generate_stream(prompt, **options) as stream:
                        async for _ in stream:
                            pass
                    rollout = stream.rollout
                counts[0] += 1
                counts[1] += rollout.completions[0].finish_reason == "abort"

            await request(0)
            async with busy(concurrent, request):
                begun.set()
                while not stop.is_set():  # a thread that waits for it would keep a process whose rollouts have failed
                    await asyncio.sleep(0.1)

    asyncio.run(run())
