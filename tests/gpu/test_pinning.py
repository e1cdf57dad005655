"""A trainer's own copies to its GPU are right after a push from host memory has ended."""

import mmap

import numpy as np
import torch

from rollout_service.client._shared_memory import HostMemory

NBYTES = 64 << 20


def test_memory_after_a_push_is_copied_as_it_is():
    torch.cuda.init()
    memory = HostMemory(NBYTES)
    memory.room(0, NBYTES).fill_(1)
    memory.close()
    del memory
    for value in range(2, 6):  # Linux gives the first of them the address of the push's memory
        later = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(later, np.uint8)[:] = value
        copied = torch.frombuffer(later, dtype=torch.uint8).to("cuda", non_blocking=True)
        assert bool((copied == value).all())
