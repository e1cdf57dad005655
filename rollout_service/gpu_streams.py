"""A stream of CUDA for each thread: of one for all, copies to the GPU and from it would wait for each other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_of_thread = threading.local()


@contextmanager
def own_stream(gpu: torch.device) -> Iterator[torch.cuda.Stream]:
    """What is queued inside goes to this thread's own stream, after what its current one has.

    Of the lowest priority that there is, which is also that of an engine's own kernels.
    """
    streams: dict[torch.device, torch.cuda.Stream] | None = getattr(_of_thread, "streams", None)
    if streams is None:
        streams = _of_thread.streams = {}
    if gpu not in streams:
        streams[gpu] = torch.cuda.Stream(gpu)
    streams[gpu].wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.device(gpu), torch.cuda.stream(streams[gpu]):
        yield streams[gpu]
