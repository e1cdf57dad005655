"""Published versions behind a URL: in an object store or on a web server, read through fsspec into a local folder.

fsspec finds the file system by the URL's scheme: ``s3://`` needs the package s3fs, ``gs://`` gcsfs. Credentials come
from the environment, as those packages document. A version is visible once its index is there, which the known trainers
write last.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import xxhash

from rollout_service.errors import Forbidden, InvalidManifest, InvalidRequest, NotFound, NotReady, RolloutServiceError
from rollout_service.model.weight_files import INDEX_FILE, listed_files
from rollout_service.protocol.upload import URL
from rollout_service.runtime.threads import in_threads
from rollout_service.store.durable_io import make_private, no_room, remove_tree

_RANGE_BYTES = 16 << 20
CONFIG_FILE = "config.json"
"""Says how FP8 codes are to be read; not every version has it."""
_STAMP = "stamp"
"""File with a hash of the index and of what the store says about each file: sizes, times, ETags."""
_URL = re.compile(URL)
_NUMBERED = re.compile(r"weight_v(\d{1,15})")


def folder_name(version: str) -> str:
    """Return the name of a version's folder in its store."""
    return f"weight_v{int(version):06d}" if version.isdecimal() else version


def is_url(store: str) -> bool:
    """Return True for a URL, False for a folder."""
    return _URL.match(store) is not None


class Stores:
    """Reads versions of stores into folders below ``root``, once each. Thread-safe if each store has one caller."""

    def __init__(self, root: Path, allowed: tuple[str, ...]) -> None:
        """``allowed``: URLs below which a store may lie."""
        self._root, self._allowed = root, allowed
        self._urls: dict[Path, str] = {}

    def folder(self, url: str) -> Path:
        """Return the local folder of a store. Raises Forbidden."""
        url = url.rstrip("/")
        below = any(f"{url}/".startswith(f"{root.rstrip('/')}/") for root in self._allowed)
        if not below or ".." in unquote(url).split("/"):  # web clients read %2e%2e as ..
            allowed = ", ".join(self._allowed) or "none is configured"
            raise Forbidden(f"{url} is not below weights.source_urls ({allowed}): add it there")
        folder = self._root / xxhash.xxh3_128_hexdigest(url.encode())
        self._urls[folder] = url
        return folder

    def newest(self, store: str) -> int | None:
        """Return the largest number of a version that is visible; None: there is none. Raises NotReady, Forbidden."""
        if not is_url(store):
            numbers = sorted(_numbers(os.listdir(store)), reverse=True)
            # an older version that cannot be read does not matter
            return next((n for n in numbers if (Path(store) / folder_name(str(n)) / INDEX_FILE).is_file()), None)
        self.folder(store)
        with open_store(store) as (files, path):
            return next(iter(published_numbers(files, path)), None)

    def fetch(self, folder: Path, *, again: bool = False) -> None:
        """Read a version into ``folder``, if it belongs to a store and is not there yet.

        A missing version stays missing. Raises NotReady, InvalidManifest, InsufficientStorage.

        ``again``: read it anew if the store has other files under its number now.
        """
        if folder.parent not in self._urls or (folder.is_dir() and not again):
            return
        with open_store(self._urls[folder.parent]) as (files, path):
            remote = f"{path}/{folder.name}"
            try:
                index = files.cat_file(f"{remote}/{INDEX_FILE}")
            except FileNotFoundError:
                return
            names = _listed(index, remote)
            if files.exists(f"{remote}/{CONFIG_FILE}"):
                names.append(CONFIG_FILE)
            found = {name: files.info(f"{remote}/{name}") for name in names}
            stamp = xxhash.xxh3_128_hexdigest(repr([index, *found.values()]).encode())
            if folder.is_dir():
                if (folder / _STAMP).is_file() and (folder / _STAMP).read_text() == stamp:
                    return
                remove_tree(folder)
            sizes = {name: int(info["size"]) for name, info in found.items()}
            make_private(self._root)
            if shutil.disk_usage(self._root).free < sum(sizes.values()):
                raise no_room(f"{remote}", self._root, sum(sizes.values()))
            unfinished = folder.with_suffix(".unfinished")
            remove_tree(unfinished)
            unfinished.mkdir(parents=True)
            _read_all(files.cat_file, remote, unfinished, sizes)
            (unfinished / INDEX_FILE).write_bytes(index)
            (unfinished / _STAMP).write_text(stamp)
            unfinished.rename(folder)

    def keep_only(self, folder: Path) -> None:
        """Remove the other versions of the store of ``folder``."""
        if folder.parent in self._urls:
            for other in folder.parent.iterdir():
                if other != folder:
                    remove_tree(other)


def published_numbers(files: Any, path: str) -> Iterator[int]:
    """Yield the numbers of visible versions in a store, largest first; see ``open_store``."""
    for number in sorted(all_numbers(files, path), reverse=True):
        if files.exists(f"{path}/{folder_name(str(number))}/{INDEX_FILE}"):
            yield number


def all_numbers(files: Any, path: str) -> Iterator[int]:
    """Yield the numbers of all versions in a store, also of those that were not written completely."""
    return _numbers([name.rstrip("/").rpartition("/")[2] for name in files.ls(path, detail=False)])


def _numbers(names: list[str]) -> Iterator[int]:
    return (int(found[1]) for found in map(_NUMBERED.fullmatch, names) if found is not None)


def _listed(index: bytes, remote: str) -> list[str]:
    try:
        return listed_files(index)
    except ValueError as error:
        if b"delta_encoding" in index and "names no file" in str(error):
            return []  # a delta without a change
        raise InvalidManifest(f"{remote}: {error}") from error


def _read_all(read: Callable[..., bytes], remote: str, folder: Path, sizes: dict[str, int]) -> None:
    """Read files in ranges, several at once. Raises NotReady for a range of another length."""
    ranges = []
    for name, size in sizes.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
        ranges += [(name, start, min(start + _RANGE_BYTES, size)) for start in range(0, size, _RANGE_BYTES)]

    def fill(item: tuple[str, int, int]) -> None:
        name, start, end = item
        data = read(f"{remote}/{name}", start=start, end=end)  # by name: s3fs has another parameter before them
        if len(data) != end - start:
            raise NotReady(f"{remote}/{name} has {len(data)} bytes from {start} to {end}: send the call again")
        with (folder / name).open("r+b") as file:
            file.seek(start)
            file.write(data)

    for _ in in_threads(fill, ranges):
        pass


@contextmanager
def open_store(url: str) -> Iterator[tuple[Any, str]]:
    """Yield a store's file system and the store's path in it. Raises NotReady for a store that cannot be reached."""
    try:
        files, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise InvalidRequest(f"{url} cannot be opened: {error}; install the package for its scheme") from error
    try:
        yield files, path.rstrip("/")
    except RolloutServiceError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{url} is not there: {error}") from error
    except Exception as error:  # each kind of store raises its own
        raise NotReady(f"{url} cannot be reached: {error!r}; send the call again") from error
