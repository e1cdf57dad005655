"""A trainer's tensors: their table of names, dtypes and shapes, and their values, one tensor at a time.

Only functions called from ``push_weights`` are here. They import torch when called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor

if TYPE_CHECKING:
    import torch

    NamedTensors = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Callback with (bytes on the service, total bytes), called after each part. A delta counts the bytes of compared
tensors."""


class TensorSource:
    """Named tensors with their table. Iterating yields ``(name, tensor)`` in table order and gathers each ``DTensor``.

    Raises ValueError at the first tensor that differs from the table.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        table: Sequence[UploadTensor] | None,
        last: tuple[UploadTensor, ...] = (),
    ) -> None:
        """Read or build the table. ``last``: the table of the previous push, reused if the tensors are the same."""
        self._checksums: dict[str, torch.Tensor] = {}
        """Checksums of uncopied tensors from an iterator, whose memory a later tensor may overwrite."""
        self._pairs = _pairs(named_tensors, self._checksums, known=table is not None)
        self.held = isinstance(self._pairs, list | tuple)
        """True if all tensors exist and stay unchanged. False if each is made in turn."""
        self.table = tuple(table) if table is not None else _table(self._pairs, last)
        self.gpu = _gpu_of(self._pairs) if self.held else _current_gpu()
        """The GPU of the first GPU tensor. If tensors are made in turn, the current GPU of this process."""
        self.remaining: Iterator[tuple[str, torch.Tensor]] = iter(())
        """The tensors that the iteration of ``begin`` has not yielded yet."""

    @property
    def can_be_read_again(self) -> bool:
        """True if all tensors can be iterated again without a new gather on other ranks."""
        return iter(self._pairs) is not self._pairs and not other_ranks_gather()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._checked(own_memory=False)

    def begin(self, *, own_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate from the first tensor on. ``own_memory``: tensors keep their values when a generator makes the next
        one."""
        self.remaining = self._checked(own_memory=own_memory and not self.held)
        return self.remaining

    def _checked(self, *, own_memory: bool) -> Iterator[tuple[str, torch.Tensor]]:
        expected = iter(self.table)
        are_same: dict[str, torch.Tensor] = {}
        for name, tensor in _checked_pairs(self._pairs):
            entry = next(expected, None)
            if entry is None or not _is(entry, name, tensor):
                found = _spell(describe(name, tensor))
                raise ValueError(f"tensors and table differ: the table says {_spell(entry)}, then came {found}")
            if (before := self._checksums.get(name)) is not None:
                are_same[name] = (before == checksum(tensor)).all()
            whole = gather(tensor)
            yield name, whole.detach().clone() if own_memory and _shares_memory(whole, tensor) else whole
            del tensor, whole  # freed before a generator makes the next tensor
        if (entry := next(expected, None)) is not None:
            raise ValueError(f"tensors and table differ: the table says {_spell(entry)}, but the tensors ended")
        # at the end, because each answer waits for the GPU while other ranks wait for this one's gathers
        if overwritten := [name for name, is_same in are_same.items() if not is_same]:
            raise ValueError(
                f"{len(overwritten)} tensors, such as {overwritten[0]}, were overwritten after the iterator yielded "
                "them, so nothing is committed: yield copies, or give tensor_table so that each is sent before the "
                "next is made"
            )


class TensorThread:
    """The only thread of a push that reads tensors, so that copies and collectives do not block the event loop.

    It uses the CUDA device and stream of the thread that creates this object. Work queued there before, such as the
    optimizer's step, therefore finishes before a tensor is read.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "push-weights", initializer=_cuda_stream_of_this_thread())

    async def call(self, function: Callable[..., Result], *args: object) -> Result:
        """Run ``function`` in the thread; calls run in order."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """End the thread after its current call."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def describe(name: str, tensor: torch.Tensor) -> UploadTensor:
    """Return the table entry of a tensor, or of the whole ``DTensor``. Raises ValueError if it cannot be sent."""
    if (why := _why_not_sent(name, tensor)) is not None:
        raise ValueError(f"tensor {name} cannot be sent: {why}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(
            f"tensor {name} is {dtype}, but weights are sent as {', '.join(DTYPE_BYTES)}: cast it first, "
            "e.g. tensor.to(torch.bfloat16), or leave it out if it is no weight"
        )
    return UploadTensor(name=name, dtype=dtype, shape=tuple(tensor.shape))


def _why_not_sent(name: object, tensor: object) -> str | None:
    """Return the reason why a tensor has no bytes that could be sent, and what to do; None: it has."""
    import torch

    if not isinstance(name, str):
        return f"its name is a {type(name).__name__}; give pairs of a name and a tensor, as named_parameters() does"
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}; give a torch.Tensor"
    if tensor.is_nested:
        return "it is nested; send each of its tensors by a name of its own"
    if tensor.is_quantized:
        return f"it is quantized ({tensor.dtype}); send tensor.dequantize()"
    if tensor.is_meta:
        return "it is on the meta device and has no values; load or initialize the weights first"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; send tensor.to_dense()"
    return None


def _is(entry: UploadTensor, name: str, tensor: torch.Tensor) -> bool:
    """Return True if ``entry`` describes the tensor. Builds no new entry, because a push checks every tensor."""
    is_sent = _why_not_sent(name, tensor) is None and name == entry.name
    return is_sent and tensor.shape == entry.shape and str(tensor.dtype)[len("torch.") :] == entry.dtype


def described(
    pairs: Iterable[tuple[str, torch.Tensor]], table: list[UploadTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs, and append the description of each to ``table``, for later pushes with the same names."""
    for name, tensor in pairs:
        table.append(describe(name, tensor))
        yield name, tensor
        del tensor  # freed before a generator makes the next tensor


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a ``DTensor``, with a collective over its mesh, or any other tensor unchanged."""
    import torch

    full_tensor = getattr(tensor, "full_tensor", None)
    if full_tensor is None:
        return tensor
    with torch.no_grad():
        return cast(torch.Tensor, full_tensor())


def other_ranks_gather() -> bool:
    """Return True if ``torch.distributed`` runs with other ranks, which hang if this rank skips a gather."""
    import torch.distributed

    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@asynccontextmanager
async def every_rank_gathers(source: TensorSource, thread: TensorThread) -> AsyncIterator[None]:
    """At exit, gather the tensors that remain in ``source`` if other ranks take part."""
    source.begin()
    try:
        yield
    except asyncio.CancelledError:
        source.remaining = iter(())  # a cancelled push does not wait for other ranks
        raise
    finally:
        remaining, source.remaining = source.remaining, iter(())  # without a cycle, memory is freed at once
        if other_ranks_gather():
            await thread.call(drain, remaining)


def drain(tensors: Iterable[object]) -> None:
    """Iterate to the end: join every gather and keep nothing."""
    for _ in tensors:
        pass


def _pairs(
    named_tensors: NamedTensors, checksums: dict[str, torch.Tensor], *, known: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(named_tensors, torch.nn.Module):
        # not named_parameters(), which omits one name of two tied weights, and persistent buffers
        named_tensors = named_tensors.state_dict()
    if isinstance(named_tensors, dict):
        return list(named_tensors.items())
    if isinstance(named_tensors, Mapping):
        named_tensors = named_tensors.items()  # such a mapping may make each tensor in turn
    if not isinstance(named_tensors, Iterable):
        raise ValueError(f"a {type(named_tensors).__name__} came as named_tensors: give a module, a mapping, or pairs")
    if known or iter(named_tensors) is not named_tensors:
        return named_tensors
    return [(name, _hold(name, tensor, checksums)) for name, tensor in _checked_pairs(named_tensors)]


def _checked_pairs(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs. Raises ValueError for something else."""
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(
                f"a {type(pair).__name__} came where a pair of a name and a tensor should: give a module, a mapping, "
                "or pairs, as named_parameters() does"
            )
        yield pair
        del pair  # freed before a generator makes the next tensor


def _hold(name: str, tensor: torch.Tensor, checksums: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor that stays unchanged while the iterator continues, or record the checksum of one that may not.

    Raises the ValueError of ``describe``.
    """
    import torch

    describe(name, tensor)  # one that cannot be sent may not be copied either
    if isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, "full_tensor"):
        checksums[name] = checksum(tensor)
        return tensor
    # a generator may refill one buffer for each of its tensors
    return tensor.cpu() if tensor.is_cuda else tensor.detach().clone(memory_format=torch.contiguous_format)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over the tensor's bits: int64 [N] on its device, N about ``nbytes`` / 8192. Does not wait for a GPU.

    For a ``DTensor``, only this rank's shard is summed.
    """
    import torch

    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().reshape(-1).view(torch.uint8)
    # words of 8 bytes, since torch widens smaller integers in memory before the sum
    words = flat[: flat.numel() // 8 * 8]
    words = (words.clone() if words.storage_offset() % 8 else words).view(torch.int64)
    rows = words[: words.numel() // 1024 * 1024].view(-1, 1024).sum(dim=1)
    rest = words[rows.numel() * 1024 :].sum()
    return torch.cat([rows, rest.view(1), flat[words.numel() * 8 :].sum(dtype=torch.int64).view(1)])


def _shares_memory(whole: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if a gathered tensor may share memory with the trainer's own."""
    if whole is tensor:
        return True
    to_local = getattr(tensor, "to_local", None)
    return to_local is None or bool(whole.data_ptr() == to_local().data_ptr())


def _gpu_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> torch.device | None:
    return next((tensor.device for _, tensor in _checked_pairs(pairs) if getattr(tensor, "is_cuda", False)), None)


def _current_gpu() -> torch.device | None:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def _table(pairs: Iterable[tuple[str, torch.Tensor]], last: tuple[UploadTensor, ...]) -> tuple[UploadTensor, ...]:
    if (
        isinstance(pairs, list | tuple)
        and 0 < len(pairs) == len(last)
        and all(_is(entry, *pair) for entry, pair in zip(last, _checked_pairs(pairs), strict=True))
    ):
        return last
    table: dict[str, UploadTensor] = {}
    for name, tensor in _checked_pairs(pairs):
        if name in table:
            raise ValueError(f"tensor {name} comes twice: a version has each name once")
        table[name] = describe(name, tensor)
    if not table:
        raise ValueError("there are no tensors to push")
    return tuple(table.values())


def _spell(entry: UploadTensor | None) -> str:
    return f"{entry.name} {entry.dtype}{list(entry.shape)}" if entry else "nothing more"


def _cuda_stream_of_this_thread() -> Callable[[], None]:
    import torch

    from rollout_service.gpu.streams import current_stream_is_own

    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def initialize() -> None:
        current_stream_is_own()
        if stream is not None:
            torch.cuda.set_stream(stream)

    return initialize
