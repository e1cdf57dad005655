"""A stream of CUDA for each thread: of one for all, copies to the GPU and from it would wait for each other.

And small copies that do not wait: a thread that waits queues nothing meanwhile, and where several processes share a
GPU it serves them in turns.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_of_thread = threading.local()


def current_stream_is_own() -> None:
    """From now on this thread's own stream of each GPU is the one that is current, whichever that is.

    For a thread that ends after a push: torch keeps the memory of each stream that ever allocated some, and would hand
    such a thread another one of its 32 streams each time.
    """
    _of_thread.keeps_current = True


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """What is launched, or registered, inside is on ``device``; on the CPU it changes nothing.

    A thread's device is the first one if nobody says otherwise, and Triton launches there, wherever the memory is.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def own_stream(gpu: torch.device) -> Iterator[torch.cuda.Stream]:
    """What is queued inside goes to this thread's own stream, after what its current one has.

    Of the lowest priority that there is, which is also that of an engine's own kernels. After
    ``current_stream_is_own`` it stays in the current one.
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
    elif torch.cuda.current_device() == gpu.index:  # inside of another one
        yield streams[gpu]
        return
    with torch.cuda.device(gpu), torch.cuda.stream(streams[gpu]):
        yield streams[gpu]


def own_stream_of(device: torch.device) -> AbstractContextManager[torch.cuda.Stream | None]:
    """As ``own_stream``; of the CPU, where kernels run in Triton's interpreter, there is none."""
    return own_stream(device) if device.type == "cuda" else nullcontext()


@contextmanager
def own_stream_done(gpu: torch.device) -> Iterator[None]:
    """As ``own_stream``; all that was queued inside is done when this ends, however it does."""
    with own_stream(gpu) as stream:
        try:
            yield
        finally:
            stream.synchronize()


@functools.cache
def upload_stream(gpu: torch.device) -> torch.cuda.Stream:
    """The process's stream for copies to a GPU that go on beside what is computed there."""
    return torch.cuda.Stream(gpu)


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether what is done with it is done by a GPU, and takes a wait to be seen."""
    return tensor.is_cuda


def queued_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on ``device`` of a tensor in the host's memory, which may go; for what is queued on the current stream."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def queued_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, to be read once the current stream has come so far; of a tensor on any device."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def passed(device: torch.device) -> Callable[[], None]:
    """What waits, with Python's lock free, until all that the current stream has now is done; for any thread."""
    if device.type != "cuda":
        return lambda: None
    # who waits sleeps: by default CUDA keeps a core busy for each thread that waits, and others have work for it
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
