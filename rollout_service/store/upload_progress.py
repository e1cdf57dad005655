"""Which tensors of an upload are stored already: readers of a log in memory may copy these before it is committed.

A file beside those of the upload, which its writer and its readers map: ``TensorPlaces.digest`` of its tensors, then a
byte for each tensor, in the order of the files, which becomes 1 once the tensor's bytes are where they belong. It is a
hint: an upload may be dropped, or a tensor stored again. Who reads early must compare what it has read with the
manifest of the version that is committed. Needs neither torch nor vllm.
"""

import hashlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

PROGRESS_FILE = "progress"
_DIGEST_BYTES = hashlib.sha256().digest_size


class UploadProgress:
    """The writer's. Threads may share it."""

    def __init__(self, folder: Path, places: bytes, numbers: Mapping[str, int]) -> None:
        """
        Args:
            folder: of the upload, whose files have their sizes.
            places: ``TensorPlaces.digest``.
            numbers: of each tensor, its place in the order of the files.

        Raises OSError.
        """
        self._path, self._numbers = folder / PROGRESS_FILE, numbers
        # readers look for the name: what they find under it is complete
        unnamed = folder / f".{PROGRESS_FILE}"
        unnamed.write_bytes(places + bytes(len(numbers)))
        with unnamed.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        unnamed.rename(self._path)

    def stored(self, name: str) -> None:
        """A tensor's bytes are in their file. Raises KeyError."""
        self._map[_DIGEST_BYTES + self._numbers[name]] = 1

    def close(self) -> None:
        """Nothing is stored any more: the upload is complete, or was dropped."""
        self._path.unlink(missing_ok=True)
        self._map.close()


class UploadToRead:
    """A reader's, of one upload. A context manager."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of the upload. Raises OSError if it is not there, or is no longer."""
        self.folder = folder
        self._file = (folder / PROGRESS_FILE).open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)

    @classmethod
    def newest(cls, uploads: Path) -> "UploadToRead | None":
        """That of the highest version of which files are being written. ``uploads``: the folder that has theirs."""
        try:
            versions = sorted((int(each.name) for each in os.scandir(uploads) if each.name.isdecimal()), reverse=True)
        except FileNotFoundError:
            return None
        for version in versions:
            try:
                return cls(uploads / str(version))
            except FileNotFoundError:  # complete, dropped, or not begun
                continue
        return None

    @property
    def places(self) -> bytes:
        """``TensorPlaces.digest`` of its tensors."""
        return self._map[:_DIGEST_BYTES]

    @property
    def is_over(self) -> bool:
        """Whether its writer has ended: asked before ``stored``, that does not change afterwards."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def stored(self) -> npt.NDArray[np.bool_]:
        """Of each tensor, in the order of the files, whether its bytes are there. [tensors]"""
        return np.frombuffer(self._map[_DIGEST_BYTES:], np.bool_)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()
