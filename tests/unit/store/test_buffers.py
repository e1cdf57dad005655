"""Buffers are reused once nothing refers to them."""

import gc
from collections.abc import Callable
from mmap import PAGESIZE

from rollout_service.store.buffers import BufferPool, ThreadBuffers


def test_a_pool_reuses_freed_memory():
    pool = BufferPool()
    first, second = pool.take(PAGESIZE), pool.take(10)
    first[:5] = b"first"
    second[:6] = b"second"
    del first
    gc.collect()
    assert pool.take(PAGESIZE)[:5] == b"first" and second[:6] == b"second"


def test_a_thread_registers_the_buffer_that_it_keeps():
    registered: list[int] = []

    def register(memory: memoryview) -> Callable[[], None]:
        registered.append(memory.nbytes)
        return lambda: registered.remove(memory.nbytes)

    buffers = ThreadBuffers(register)
    for nbytes in (PAGESIZE, 1, 3 * PAGESIZE, 2 * PAGESIZE):
        assert buffers.take(nbytes).nbytes >= nbytes
    assert registered == [3 * PAGESIZE]
