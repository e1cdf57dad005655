"""Progress of an upload's tensors: readers of a log in memory may copy stored tensors before the commit.

The writer and the readers map a file beside those of the upload. It has ``TensorPlaces.digest`` of the tensors, then a
byte for each tensor, in the order of the files. The byte becomes 1 once the tensor's bytes are stored. This is a hint:
an upload may be dropped, or a tensor stored again. An early reader must therefore compare its bytes with the manifest
of the committed version. Needs neither torch nor vllm.
"""

import hashlib
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

PROGRESS_FILE = "progress"
_DIGEST_BYTES = hashlib.sha256().digest_size


class UploadProgress:
    """The writer's view of the progress. Thread-safe."""

    def __init__(self, folder: Path, places: bytes, numbers: Mapping[str, int]) -> None:
        """
        Args:
            folder: folder of the upload, whose files already have their final sizes.
            places: ``TensorPlaces.digest``.
            numbers: index of each tensor in the order of the files.

        Raises OSError.
        """
        self._numbers = numbers
        # renamed when complete, since readers look for the name
        unnamed = folder / f".{PROGRESS_FILE}"
        unnamed.write_bytes(places + bytes(len(numbers)))
        with unnamed.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        unnamed.rename(folder / PROGRESS_FILE)
        self._folder = os.open(folder, os.O_RDONLY)  # which may be renamed: see ``UploadSession.renumber``

    def stored(self, name: str) -> None:
        """Note that a tensor's bytes are in their file. Raises KeyError."""
        self._map[_DIGEST_BYTES + self._numbers[name]] = 1

    def close(self) -> None:
        """Remove the file: the upload is complete, or was dropped."""
        with suppress(FileNotFoundError):
            os.unlink(PROGRESS_FILE, dir_fd=self._folder)
        os.close(self._folder)
        self._map.close()


class UploadToRead:
    """A reader's view of one upload. A context manager."""

    def __init__(self, folder: Path) -> None:
        """``folder``: folder of the upload. Raises OSError if it does not exist."""
        self.folder = folder
        self._file = (folder / PROGRESS_FILE).open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)

    @classmethod
    def newest(cls, uploads: Path) -> "UploadToRead | None":
        """Return the upload of the highest version that is being written, or None. ``uploads``: folder of all."""
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
        """Return ``TensorPlaces.digest`` of its tensors."""
        return self._map[:_DIGEST_BYTES]

    @property
    def is_over(self) -> bool:
        """Return True if its writer has ended. If this is checked before ``stored``, the latter is final."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def stored(self) -> npt.NDArray[np.bool_]:
        """Return the mask of stored tensors, in the order of the files, bool [tensors]."""
        return np.frombuffer(self._map[_DIGEST_BYTES:], np.bool_)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()
