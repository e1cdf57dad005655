"""Buffers are reused once nothing refers to them."""

import gc
from mmap import PAGESIZE

from rollout_service.store.buffers import BufferPool


def test_a_pool_reuses_freed_memory():
    pool = BufferPool()
    first, second = pool.take(PAGESIZE), pool.take(10)
    first[:5] = b"first"
    second[:6] = b"second"
    del first
    gc.collect()
    assert pool.take(PAGESIZE)[:5] == b"first" and second[:6] == b"second"
