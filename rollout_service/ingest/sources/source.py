"""What a source of weights is: the seam at which another way to bring a version is added, as one new file here."""

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def as_tensor(data: memoryview, dtype: str, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A tensor of that dtype (its name in a tensor table) whose first byte is ``data[start]``; without a copy.

    It holds on to ``data`` itself, which may be longer.
    """
    if 0 in shape:  # torch takes no empty buffer
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(data, dtype=_DTYPES[dtype], count=math.prod(shape), offset=start).view(shape)


def of_dtype(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 [nbytes] on any device, as a tensor of that dtype, whose elements are aligned; without a copy."""
    return data.view(_DTYPES[dtype]).view(shape)


def in_batches(sizes: Iterable[tuple[str, int]], batch_bytes: int) -> Iterator[list[str]]:
    """Names, given with their bytes, in lists that end with the first name that makes them ``batch_bytes`` or more."""
    names: list[str] = []
    size = 0
    for name, nbytes in sizes:
        names.append(name)
        size += nbytes
        if size >= batch_bytes:
            yield names
            names, size = [], 0
    if names:
        yield names


class WeightSource(Protocol):
    """Has all tensors of a version when the upload begins; parts, which come one by one, are in ``parts.py``.

    What reading raises makes the version fail by name: RolloutServiceError, OSError or RuntimeError.
    """

    table: tuple[UploadTensor, ...]
    """Names, dtypes and shapes of all tensors; checked against the served model before anything is read."""

    @property
    def stamp(self) -> str:
        """The same for the same content: tells an upload that is begun again from another one."""

    def batches(self, batch_bytes: int) -> Iterator[list[str]]:
        """The names of all tensors, in lists that are read together, of about ``batch_bytes``."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each of these tensors, in host memory. Called from several threads at once.

        What is yielded is used before the next is asked for, so that one buffer may hold all of them.
        """
