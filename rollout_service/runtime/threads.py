"""Threads for work that waits on memory, files and devices, and releases the GIL meanwhile."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

STRETCH_BYTES = 64 << 20
"""Bytes per thread of a tensor that several threads share (``stretches``)."""
_MAX_IO = 8
"""Maximum number of threads; more do not read memory faster."""
_MAX_COMPUTING = 16
"""Maximum number of computing threads; with more, they mostly wait for the GIL."""


def io_threads() -> int:
    """Return the number of threads for I/O: half of the usable cores, since an engine or a trainer also needs some."""
    return max(1, min(_MAX_IO, _usable_cores() // 2))


def compute_threads() -> int:
    """Return the number of threads for work that waits on no memory, such as compression: half of the usable cores."""
    return max(1, min(_MAX_COMPUTING, _usable_cores() // 2))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # a trainer's macOS


def stretches(length: int, step: int) -> list[slice]:
    """Split ``range(length)`` into pieces of ``step``, the last of which may be shorter, to share one tensor among
    threads.

    A large embedding would otherwise occupy one thread for longer than all other work.
    """
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Map in ``io_threads`` threads, with results in the order of the items; after a failure no new item begins.

    A single item is processed in this thread.
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
    """Run ``asyncio.to_thread``, but if cancelled, wait until the thread has ended.

    For work on files or locks that the caller closes afterwards. A thread that outlived its caller would write into
    whatever file gets the closed descriptor's number, or beside the next holder of the lock.
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
        work.exception()  # retrieve it: the cancelled caller does not need it
    raise cancelled
