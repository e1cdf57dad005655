"""A CUDA stream for each thread: in a shared stream, copies to and from the GPU would wait for each other.

Also small copies without synchronization: a waiting thread queues nothing, and a GPU that several processes share
serves them in turns.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_of_thread = threading.local()


def current_stream_is_own() -> None:
    """Use the current stream of each GPU as this thread's own from now on.

    For a thread that ends after a push: torch keeps the memory of each stream that ever allocated some, and would give
    each such thread another one of its 32 streams.
    """
    _of_thread.keeps_current = True


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch and register on ``device`` within this context; no effect for the CPU.

    Without it, a thread's device is the first one, and Triton launches there, wherever the memory is.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def own_stream(gpu: torch.device) -> Iterator[torch.cuda.Stream]:
    """Queue work within this context on this thread's own stream, after the work of its current stream.

    The stream has the lowest priority, as do an engine's own kernels. After ``current_stream_is_own``, the current
    stream is used.
    """
    if getattr(_of_thread, "keeps_current", False):
        with torch.cuda.device(gpu):
            yield torch.cuda.current_stream(gpu)
        return
    streams: dict[torch.device, torch.cuda.Stream] | None = getattr(_of_thread, "streams", None)
    if streams is None:
        streams = _of_thread.streams = {}
    if gpu not in streams:
        streams[gpu] = torch.cuda.Stream(gpu)
    if (current := torch.cuda.current_stream(gpu)) != streams[gpu]:
        streams[gpu].wait_stream(current)
    elif torch.cuda.current_device() == gpu.index:  # nested in another one
        yield streams[gpu]
        return
    with torch.cuda.device(gpu), torch.cuda.stream(streams[gpu]):
        yield streams[gpu]


def own_stream_of(device: torch.device) -> AbstractContextManager[torch.cuda.Stream | None]:
    """Return ``own_stream``; for the CPU, where kernels run in Triton's interpreter, there is none."""
    return own_stream(device) if device.type == "cuda" else nullcontext()


@contextmanager
def own_stream_done(gpu: torch.device) -> Iterator[None]:
    """Use ``own_stream``, and synchronize at the end of the context, also after an error."""
    with own_stream(gpu) as stream:
        try:
            yield
        finally:
            stream.synchronize()


@functools.cache
def upload_stream(gpu: torch.device) -> torch.cuda.Stream:
    """Return the process's stream for copies to a GPU that run beside its computations."""
    return torch.cuda.Stream(gpu)


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    """Return True if a GPU processes the tensor, so that reading results needs a synchronization."""
    return tensor.is_cuda


def queued_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy of a host tensor to ``device``, on the current stream. The caller need not keep the tensor."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def queue_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to host memory, readable once the current stream has reached it; for a tensor on any device."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def record_waiter(device: torch.device) -> Callable[[], None]:
    """Return a function, for any thread, that waits for the current stream's work so far with the GIL released."""
    if device.type != "cuda":
        return lambda: None
    # a blocking event, so that waiting threads sleep: by default CUDA keeps a core busy for each of them
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
