"""Pools of buffers stay within their limits."""

import gc
from mmap import PAGESIZE

from rollout_service.store.buffers import BufferPool


def test_a_pool_respects_its_limit_and_reuses_freed_memory() -> None:
    pool = BufferPool(2 * PAGESIZE)
    first, second = pool.take(PAGESIZE), pool.take(10)
    assert first is not None and second is not None and pool.take(1) is None
    first[:5] = b"first"
    del first
    gc.collect()
    again = pool.take(PAGESIZE)
    assert again is not None and again[:5] == b"first" and pool.take(1) is None


def test_a_trimmed_pool_has_room_for_buffers_of_another_size() -> None:
    pool = BufferPool(2 * PAGESIZE)
    small = pool.take(PAGESIZE)
    del small
    gc.collect()
    assert pool.take(2 * PAGESIZE) is None
    pool.trim()
    assert pool.take(2 * PAGESIZE) is not None
