"""Threads for what waits on memory, files and devices: Python's lock is free meanwhile."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

STRETCH_BYTES = 64 << 20
"""What one thread takes of a tensor that several share (``stretches``)."""
_MOST = 8
"""Memory is not read faster by more."""
_MOST_COMPUTING = 16
"""Beyond these the turns that threads take with Python's lock are what they wait for."""


def io_threads() -> int:
    """How many: half of the cores that this process may use, since an engine or a trainer wants some, too."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) // 2))


def compute_threads() -> int:
    """How many for work that waits on no memory, such as compressing: likewise, but more of them are faster."""
    return max(1, min(_MOST_COMPUTING, len(os.sched_getaffinity(0)) // 2))


def stretches(length: int, step: int) -> list[slice]:
    """``range(length)`` in pieces of ``step``, the last of which may be shorter: one tensor for several threads.

    A vocabulary's embedding would keep one thread busy for longer than everything else takes.
    """
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """``map`` in ``io_threads`` threads, results in the order of the items; after a failure nothing new begins.

    A single item is this thread's.
    """
    if len(items) == 1:
        yield function(items[0])
        return
    pool = ThreadPoolExecutor(io_threads())
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


async def to_thread_and_back(
    function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """``asyncio.to_thread``, but who is cancelled waits until the thread has ended.

    For work on what its caller closes or unlocks afterwards: a thread that outlived its caller would write into
    whatever file has the number of the closed descriptor next, or beside the next holder of the lock.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return work.result()
    if not work.cancelled():
        work.exception()  # retrieved: whoever was cancelled does not care
    raise cancelled
