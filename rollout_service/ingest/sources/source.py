"""Interface of weight sources. To add another way to bring in a version, add a file with an implementation here."""

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def as_tensor(data: memoryview, dtype: str, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """View memory from ``data[start]`` on as a tensor of that dtype (its name in a tensor table), without a copy.

    The tensor keeps ``data`` alive, which may be longer.
    """
    if 0 in shape:  # torch accepts no empty buffer
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(data, dtype=_DTYPES[dtype], count=math.prod(shape), offset=start).view(shape)


def of_dtype(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View uint8 [nbytes], on any device and aligned for ``dtype``, as a tensor of that dtype, without a copy."""
    return data.view(_DTYPES[dtype]).view(shape)


class WeightSource(Protocol):
    """A source that has all tensors of a version when the upload begins. ``ingest/staged_parts.py`` has the parts of an
    upload, which arrive one by one.

    If reading raises RolloutServiceError, OSError or RuntimeError, the version fails with that error.
    """

    table: tuple[UploadTensor, ...]
    """Names, dtypes and shapes of all tensors; checked against the served model before anything is read."""

    @property
    def stamp(self) -> str:
        """Return a stamp of the content, to tell an upload that is begun again from another one."""

    def batches(self, batch_bytes: int) -> Iterator[list[str]]:
        """Yield the names of all tensors, in lists of about ``batch_bytes`` that are read together."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of these tensors, in host memory. Called from several threads at once.

        The caller finishes using each tensor before requesting the next, so one buffer may hold all of them.
        """
