"""Threads for what waits on memory, files and devices: Python's lock is free meanwhile."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST = 8
"""Memory is not read faster by more."""


def io_threads() -> int:
    """How many: half of the cores that this process may use, since an engine or a trainer wants some, too."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) // 2))


def in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """``map`` in ``io_threads`` threads, results in the order of the items; after a failure nothing new begins."""
    pool = ThreadPoolExecutor(io_threads())
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)
