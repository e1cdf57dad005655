"""The weights in the trainer's dtype, to which the ingest applies folders of changes.

They begin as the served model's files, or as a whole folder that was pulled, and are kept once:

    <root>/<generation>/*.safetensors   the files of the version in STATE
    <root>/OWNER                        marks a folder of this class, and is locked by the process that uses it
    <root>/STATE                        the version, and the store that it comes from
    <root>/PENDING                      the next generation, while files move into it
    <root>/spare                        a file of the last generation, whose pages the next file gets
    <root>/changes/<number>/            copies of the folders of changes that PENDING names

Converting a version applies the changes while its tensors are read. Once they are all verified, ``settle`` writes the
changed files. A file is in exactly one generation, and its rename is atomic, so that no change is applied twice.
"""

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash
from pydantic import ValidationError

from rollout_service.errors import (
    InvalidDelta,
    InvalidManifest,
    InvalidRequest,
    NotFound,
    NotReady,
    RolloutServiceError,
)
from rollout_service.ingest.sources.delta_folder import (
    DeltaFolder,
    Fill,
    fill_changed,
    is_delta,
    is_filled,
    version_name,
    whole_check,
)
from rollout_service.ingest.sources.folder import Entry, FolderSource, Header, allowed_path, safetensors_files
from rollout_service.ingest.stores import CONFIG_FILE, Stores, folder_name, is_url
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.ignored import IgnoredTensors
from rollout_service.runtime.threads import in_threads
from rollout_service.store.buffers import BufferPool, ThreadBuffers
from rollout_service.store.durable_io import PASSING, WriterLock, make_private, no_room, remove_tree, replace_synced
from rollout_service.store.mapped_files import Registered
from rollout_service.store.reading import read_at
from rollout_service.store.writer import write_at

logger = logging.getLogger(__name__)
MAX_LINKS = 64
"""Maximum number of deltas that are applied for one version."""
_COUNTED = re.compile(r"[1-9]\d*$")
"""The name of a base that a trainer has published, such as ``step-41``. A base that is not there, and has another name,
``0`` or ``base``, is the served model."""
_OWNER = "OWNER"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _State(Frozen):
    source: str
    """The store of the version."""
    version: str
    stamp: str | None = None
    """The stamp of the delta that made it; None: a whole folder was kept."""
    generation: int
    boot: str
    """The host's boot: the files are not synced, so they do not outlive it."""


class _Pending(Frozen):
    state: _State
    links: tuple[Path, ...]


class _Plan(NamedTuple):
    source: str
    version: str
    seed: Path | None
    """Folder with whole tensors; None: the kept files."""
    links: tuple[DeltaFolder, ...] = ()
    """Changes, oldest first."""
    stamp: str | None = None
    """The stamp of a delta."""

    check: Callable[[str, memoryview], None] | None = None
    """Compares the whole tensors with their checksums."""

    def apply(self, name: str, room: memoryview, fill: Fill) -> None:
        if self.check is not None:
            fill(slice(0, room.nbytes))
            self.check(name, room)
            fill = is_filled
        fill_changed(name, room, fill, self.links)


class TrainerWeights:
    """The trainer's weights on the ingest's node. Thread-safe."""

    def __init__(
        self,
        root: Path,
        model: Path,
        roots: tuple[Path, ...],
        urls: tuple[str, ...],
        ignored: IgnoredTensors,
        registered: Registered | None = None,
    ) -> None:
        """
        Args:
            root: folder of the kept files; created when they are needed.
            model: folder of the served model, which is version 0 of each store.
            roots: folders that may contain published versions.
            urls: URLs below which they may be, too.
            ignored: tensors that are left out of versions.
            registered: registers the memory into which changed tensors are read with a GPU.
        """
        self._root, self._model, self._roots, self._ignored = root, model, roots, ignored
        self._stores = Stores(root / "stores", urls)
        self._buffers = ThreadBuffers(registered)
        self._lock, self._owner = threading.Lock(), WriterLock(root, _OWNER, "weights.trainer_root")
        self._plans: dict[Path, _Plan] = {}
        self._loaded = False
        self._state: _State | None = None

    def published(self, store: str, version: int) -> Path:
        """Return the folder of a published version, which is read if ``store`` is a URL. Version 0 need not be
        published. Raises Forbidden, NotFound, NotReady for a store that cannot be read, InvalidManifest."""
        name = folder_name(str(version))
        if version == 0:  # a run begins, and may publish other weights under numbers of the run before
            self.forget(store)
        with self._lock:
            parent = self._stores.folder(store) if is_url(store) else Path(store)
            if is_url(store):
                self._own()
            folder = parent / name if is_url(store) else allowed_path(parent / name, self._roots)
            self._stores.fetch(folder, again=True)
            if folder.is_dir() and is_url(store):
                self._load()
                self._plan(folder)  # reads older versions that it needs, while other weights may still be pushed
        if folder.is_dir():
            return folder
        if version == 0:
            return self._model
        raise NotFound(f"version {version} is not published: {store} has no {name} that the ingest can see")

    def newest(self, store: str) -> int | None:
        """Return the largest number that is published; None: there is none. Raises Forbidden, NotReady, OSError."""
        if not is_url(store):
            allowed_path(Path(store), self._roots)
        return self._stores.newest(store)

    def forget(self, store: str) -> None:
        """Remove what was read from a URL: it may have been damaged on the way. Raises Forbidden."""
        if is_url(store):
            with self._lock:
                self._own()
                remove_tree(self._stores.folder(store))

    def name_as(self, checkpoint: Path, folder: Path) -> None:
        """Remember that a trainer names the version in ``folder`` as ``checkpoint``, also for the next process."""
        with self._lock:
            self._own()
        link = self._link(checkpoint)
        link.parent.mkdir(exist_ok=True)
        temporary = link.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder)
        os.replace(temporary, link)

    def named(self, path: Path) -> Path:
        """Return the folder that a trainer names as ``path``, or ``path``."""
        link = self._link(path)
        return link.readlink() if link.is_symlink() else path

    def _link(self, checkpoint: Path) -> Path:
        return self._root / "named" / xxhash.xxh3_128_hexdigest(os.path.normpath(checkpoint).encode())

    def source_of(self, folder: Path, *, keep: bool = False) -> FolderSource:
        """Return the tensors of a published version: those of the folder, or the kept ones with its changes.

        ``keep``: also keep a whole folder, for later deltas. Raises InvalidDelta for a version that lacks an older one,
        InvalidManifest, Forbidden, NotFound, NotReady.
        """
        if not keep and not is_delta(folder):
            return FolderSource(folder, self._roots_of(folder), self._ignored)
        with self._lock:
            self._load()
            plan = self._plan(folder)
            self._plans = {folder: plan}
            read = self._kept if plan.seed is None else plan.seed
            source = FolderSource(read, self._roots_of(read), self._ignored, plan.apply, self._buffers)
            self._require_changes_of(source, plan)
            source.stamp = plan.stamp or source.stamp
            return source

    def copy_changes(self, folder: Path) -> bool:
        """Copy the changes that ``settle`` applies: even if this process ends, it needs no published folder then.

        Return False if ``settle`` still reads the folder.
        """
        with self._lock:
            plan = self._plans.get(folder)
            if plan is None or plan.seed is not None:
                return plan is None
            copies = [self._root / "changes" / str(number) for number in range(len(plan.links))]
            try:
                for link, copy in zip(plan.links, copies, strict=True):
                    link.copy_to(copy)
                plan = plan._replace(links=tuple(map(DeltaFolder, copies)))
                if plan.links:
                    self._note_pending(self._next(plan), plan.links)
            except (RolloutServiceError, OSError) as error:
                logger.warning("the changes in %s are applied before the reply: %s", folder, error)
                return False
            self._plans[folder] = plan
            return True

    def settle(self, folder: Path) -> None:
        """Keep the version in ``folder``, all of whose tensors were read and verified. Does nothing for other folders.

        Raises OSError, InsufficientStorage, or the errors of reading the folder.
        """
        with self._lock:
            plan = self._plans.pop(folder, None)
            if plan is None or (plan.seed is None and not plan.links):
                return
            try:
                if plan.seed is None:
                    state = self._next(plan)
                    self._note_pending(state, plan.links)
                    self._finish(state, plan.links)
                else:
                    self._begin_from(plan.seed, plan)
                self._stores.keep_only(folder)
            except BaseException:
                self._loaded = False  # the next call finishes it, or begins anew
                raise

    def _plan(self, folder: Path) -> _Plan:
        source = str(folder.parent)
        if not is_delta(folder):
            version = version_name(folder.name.removeprefix("weight_v"))
            return _Plan(source, version, folder, check=self._check_of(folder))
        newest = DeltaFolder(folder, self._roots_of(folder))
        if self._is_kept(source, newest.version) and self._state is not None and self._state.stamp == newest.stamp:
            return _Plan(source, newest.version, None, (), newest.stamp)
        links, seed = self._chain(newest)
        check = None if seed in (None, self._model) else self._check_of(seed)
        return _Plan(source, newest.version, seed, tuple(links), newest.stamp, check)

    def _chain(self, newest: DeltaFolder) -> tuple[list[DeltaFolder], Path | None]:
        """Return the changes up to ``newest``, oldest first, and the whole folder below them; None: the kept files."""
        links, store, target = [newest], newest.folder.parent, f"version {newest.version} in {newest.folder}"
        while not self._is_kept(str(store), base := links[0].base):
            folder = store / folder_name(base)
            self._stores.fetch(folder)
            if not folder.is_dir():
                if _COUNTED.search(base):
                    state = self._state
                    kept = "none is kept" if state is None else f"version {state.version} of {state.source} is"
                    raise InvalidDelta(
                        f"{target} needs version {base}, which is neither kept ({kept}) nor in {store}: "
                        "publish a whole folder",
                        {"version": newest.version, "missing": base},
                    )
                return links, self._model
            if not is_delta(folder):
                return links, folder
            if len(links) == MAX_LINKS:
                raise InvalidDelta(
                    f"{target} needs more than {MAX_LINKS} deltas: publish a whole folder",
                    {"version": newest.version, "max_links": MAX_LINKS},
                )
            links.insert(0, DeltaFolder(folder, self._roots_of(folder)))
            if links[0].version != base:
                raise InvalidDelta(f"{folder} is version {links[0].version} by its index, and not {base}")
        return links, None

    def _check_of(self, folder: Path) -> Callable[[str, memoryview], None] | None:
        return whole_check(folder, safetensors_files(folder, self._roots_of(folder)))

    def _require_changes_of(self, source: FolderSource, plan: _Plan) -> None:
        for link in plan.links:
            if unknown := sorted(link.names - source.names):
                raise InvalidDelta(
                    f"version {link.version} in {link.folder} changes {unknown[0]}, which its base does not have",
                    {"version": link.version, "tensor": unknown[0]},
                )

    def _is_kept(self, source: str, version: str) -> bool:
        state = self._state
        return state is not None and (state.source, state.version) == (source, version)

    @property
    def _kept(self) -> Path:
        assert self._state is not None
        return self._root / str(self._state.generation)

    def _roots_of(self, folder: Path) -> tuple[Path, ...] | None:
        """Return the folders that must contain the files of ``folder``; None: those of the service may be anywhere."""
        return None if folder == self._model or folder.is_relative_to(self._root) else self._roots

    def _begin_from(self, seed: Path, plan: _Plan) -> None:
        """Keep a whole folder with changes in place of what is kept."""
        self._forget()
        if seed == self._model and not plan.links:
            return  # the model's own files are there
        files = safetensors_files(seed, self._roots_of(seed))
        make_private(self._root)
        needed = sum(file.stat().st_size for file in files)
        if shutil.disk_usage(self._root).free < needed:
            raise no_room("the trainer's weights, which deltas change,", self._root, needed)
        state = self._next(plan)
        self._write(files, state.generation, plan.links)
        if (seed / CONFIG_FILE).is_file():
            shutil.copyfile(seed / CONFIG_FILE, self._root / str(state.generation) / CONFIG_FILE)
        self._become(state)

    def _note_pending(self, state: _State, links: Sequence[DeltaFolder]) -> None:
        pending = _Pending(state=state, links=tuple(link.folder for link in links))
        replace_synced(self._root / "PENDING", pending.model_dump_json())

    def _finish(self, state: _State, links: Sequence[DeltaFolder]) -> None:
        """Apply changes to the kept files, one file after the other, so that only one exists twice."""
        before = self._kept
        self._write(sorted(before.glob("*.safetensors")), state.generation, links, remove=True)
        if (before / CONFIG_FILE).is_file():
            os.replace(before / CONFIG_FILE, self._root / str(state.generation) / CONFIG_FILE)
        self._become(state)

    def _write(
        self, files: Sequence[Path], generation: int, links: Sequence[DeltaFolder], *, remove: bool = False
    ) -> None:
        folder, spare, buffers = self._root / str(generation), self._root / "spare", BufferPool()
        folder.mkdir(exist_ok=True)
        for file in files:
            target = folder / file.name
            if not target.exists():  # a crash may have come between the rename and the removal
                if spare.exists():
                    os.replace(spare, _unfinished(target))
                _write_changed(file, target, links, buffers)
            if remove:
                os.replace(file, spare)  # Linux allocates new pages of a tmpfs more slowly than it writes to old ones

    def _next(self, plan: _Plan) -> _State:
        generation = 1 if self._state is None else self._state.generation + 1
        boot = _BOOT_ID.read_text()
        return _State(source=plan.source, version=plan.version, stamp=plan.stamp, generation=generation, boot=boot)

    def _become(self, state: _State) -> None:
        replace_synced(self._root / "STATE", state.model_dump_json())
        self._state = state
        self._remove_others()

    def _load(self) -> None:
        """Read what an earlier process has kept, and finish what it had begun. Raises NotReady for an error of
        ``PASSING``, and the errors of ``_own``."""
        if self._loaded:
            return
        self._own()
        self._loaded = True
        try:
            self._state = _State.model_validate_json((self._root / "STATE").read_bytes())
            if self._state.boot != _BOOT_ID.read_text():
                logger.warning("%s is from before the host's start, and is not used any more", self._root)
                self._forget()
                return
            if (pending := self._root / "PENDING").is_file():
                begun = _Pending.model_validate_json(pending.read_bytes())
                if begun.state != self._state:
                    self._finish(begun.state, [DeltaFolder(folder) for folder in begun.links])
            self._remove_others()
        except FileNotFoundError:
            self._forget()
        except (RolloutServiceError, OSError, ValidationError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                self._loaded = False
                raise NotReady(f"the weights in {self._root} cannot be read: {error}; send the call again") from error
            logger.warning("the weights in %s are lost, and the next delta needs a whole folder: %s", self._root, error)
            self._forget()

    def _own(self) -> None:
        """Make the folder this process's own. Raises InvalidRequest if it has files that this class has not made,
        LogLocked if another process uses it, or NotReady."""
        try:
            is_begun = (self._root / "STATE").exists() or (self._root / _OWNER).exists()
            others = [] if is_begun else self._generations()
            if not others:
                self._owner.acquire(0)
        except OSError as error:
            raise NotReady(
                f"weights.trainer_root={self._root} cannot be used: {error}; make it readable and writable for the "
                "service, and send the call again"
            ) from error
        if others:
            raise InvalidRequest(
                f"weights.trainer_root={self._root} holds {others[0].name}, which the service has not made: set it to "
                "a folder of its own, or leave it out"
            )

    def close(self) -> None:
        """Let another process use the folder. If a thread still writes into it, only the end of this process does."""
        if self._lock.acquire(blocking=False):
            self._owner.release()
            self._lock.release()

    def _generations(self) -> list[Path]:
        return sorted(self._root.glob("[0-9]*"))

    def _forget(self) -> None:
        self._state = None
        (self._root / "STATE").unlink(missing_ok=True)
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove all generations but the present one."""
        for name in ("PENDING", "spare"):
            (self._root / name).unlink(missing_ok=True)
        remove_tree(self._root / "changes")
        for path in self._generations():
            if self._state is None or path != self._kept:
                remove_tree(path)


def _unfinished(target: Path) -> Path:
    return target.with_suffix(".tmp")


def _write_changed(file: Path, target: Path, links: Sequence[DeltaFolder], buffers: BufferPool) -> None:
    """Write a copy of ``file`` with the changes to its tensors, several tensors at once. Overwrites an unfinished
    copy. Raises InvalidManifest for a file that is cut while it is read."""
    header = Header.of(file)
    old = os.open(file, os.O_RDONLY)
    new = os.open(_unfinished(target), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(new, header.stat.st_size)

        def change(entry: Entry) -> None:
            buffer = buffers.take(entry.nbytes)
            room = buffer[: entry.nbytes]

            def fill(part: slice) -> None:
                piece = room[part]
                if read_at(old, entry.offset + part.start, piece) < piece.nbytes:
                    raise InvalidManifest(
                        f"{entry.name} was to be read from {file}, which has become shorter; pull a whole folder"
                    )

            fill_changed(entry.name, room, fill, links)
            write_at(new, room, entry.offset)

        write_at(new, memoryview(os.pread(old, header.nbytes, 0)), 0)
        # a thread that began the largest one last would work alone
        for _ in in_threads(change, sorted(header.entries, key=lambda entry: -entry.nbytes)):
            pass
    finally:
        os.close(old)
        os.close(new)
    os.replace(_unfinished(target), target)
