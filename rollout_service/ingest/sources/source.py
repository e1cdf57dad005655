"""What a source of weights is: the seam at which another way to bring a version is added, as one new file here."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from rollout_service.protocol.upload import DTYPE_BYTES, UploadTensor

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""By their names in a tensor table."""


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
