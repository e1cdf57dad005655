"""The log on disk: what counts as committed, and what a crash or a damaged file can do."""

import errno
import itertools
import os
import re
import resource
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollout_service.errors import LogCorrupt, LogLocked, LogUnreadable, NotFound
from rollout_service.protocol.upload import BeginUpload, PathSource
from rollout_service.protocol.weight_log import Control, Head
from rollout_service.store import durable_io
from rollout_service.store import log as log_module
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE
from rollout_service.store.upload_record import UploadRecord
from tests.unit.store.versions import SECOND, commit, stage


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    return WeightLog(tmp_path / "log")


def crash_before_latest_is_replaced(log: WeightLog, version: int) -> None:
    manifest = stage(log, version)
    (log.staging(version) / MANIFEST_FILE).write_bytes(manifest.to_json())
    log.staging(version).rename(log.folder(version))


class TestCommit:
    def test_a_commit_makes_its_version_the_newest(self, log):
        commit(log, 0)
        manifest = stage(log, 5)
        head = log.commit(manifest, "abort")
        assert head == log.head() == Head(version=5, digest=manifest.digest, mode="abort")
        assert log.versions() == [0, 5]
        assert log.manifest(5) == manifest
        log.verify(manifest)

    def test_head_names_the_last_rollback(self, log):
        heads = [
            commit(log, 0),
            commit(log, 1),
            log.commit(replace(stage(log, 2), rollback_of=0), "keep"),
            commit(log, 3),
        ]
        assert [head.rolled_back_at for head in heads] == [None, None, 2, 2]


class TestCrash:
    def test_what_is_not_committed_does_not_count_and_gives_way(self, log):
        commit(log, 0)
        crash_before_latest_is_replaced(log, 1)
        (log.folder(1) / "left over").touch()
        stage(log, 2)
        assert log.versions() == [0]
        assert log.head() is not None and log.head().version == 0
        for version in (1, 2):
            with pytest.raises(NotFound, match=rf"version {version} is not in the log; it holds \[0\]"):
                log.manifest(version)
        commit(log, 1)
        assert log.versions() == [0, 1] and not (log.folder(1) / "left over").exists()

    def test_a_crash_in_the_very_first_commit_leaves_an_empty_log(self, log):
        crash_before_latest_is_replaced(log, 0)
        assert log.head() is None and log.versions() == [] and log.control() == Control()
        commit(log, 0)
        assert log.versions() == [0]

    def test_a_commit_that_fails_leaves_the_head_as_it_was(self, log):
        before = commit(log, 0)
        manifest = stage(log, 1)
        (log.root / ".LATEST.tmp").mkdir()  # so the new head cannot be written
        with pytest.raises(OSError):
            log.commit(manifest, "keep")
        assert log.head() == before and log.versions() == [0]


class TestDamage:
    def test_a_log_whose_latest_is_gone_is_corrupt_and_not_empty(self, log):
        commit(log, 0)
        commit(log, 7)
        (log.root / "LATEST").unlink()
        with pytest.raises(LogCorrupt, match=r"versions \[0, 7\] but no LATEST"):
            log.head()

    def test_a_folder_of_others_is_no_version_that_a_crash_left(self, log):
        (log.root / "0").mkdir(parents=True)
        (log.root / "0" / "notes").touch()
        with pytest.raises(LogCorrupt, match=r"versions \[0\] but no LATEST"):
            commit(log, 0)
        assert (log.root / "0" / "notes").exists()

    def test_a_damaged_control_is_corrupt(self, log):
        log.set_control(Control(paused=True))
        (log.root / "CONTROL").write_text('{"paused": ')
        with pytest.raises(LogCorrupt, match="CONTROL does not parse"):
            log.control()

    @pytest.mark.parametrize("content", [b"", b'{"version": 3, "dig', b"\xff\xfe", b'{"version": 3}'])
    def test_a_latest_that_does_not_parse_is_corrupt(self, log, content):
        commit(log, 0)
        (log.root / "LATEST").write_bytes(content)
        with pytest.raises(LogCorrupt, match=r"LATEST does not parse"):
            log.head()

    def test_a_reader_never_sees_a_half_written_latest(self, log):
        commit(log, 0)
        writer = threading.Thread(target=lambda: [commit(log, version) for version in range(1, 40)])
        writer.start()
        seen: list[int] = []
        while writer.is_alive() or not seen:
            head = log.head()
            assert head is not None and log.manifest(head.version).digest == head.digest
            seen.append(head.version)
        assert seen == sorted(seen)
        assert log.versions() == list(range(40))

    @pytest.mark.parametrize(
        ("known", "other", "why"),
        [
            (r".*", "{}", MANIFEST_FILE),
            ('"fingerprint":"model"', '"fingerprint":"modem"', "but LATEST says"),
            ('"version":1', '"version":0', "is of version 0"),
        ],
        ids=["no manifest", "not the committed one", "another version's"],
    )
    def test_a_wrong_manifest_is_corrupt(self, log, known, other, why):
        commit(log, 1)
        path = log.folder(1) / MANIFEST_FILE
        path.write_text(re.sub(known, other, path.read_text(), count=1))
        with pytest.raises(LogCorrupt, match=why):
            log.manifest(1)

    def test_verify_finds_a_flipped_bit_in_every_byte_of_every_file(self, log):
        manifest = stage(log, 0)
        source = BeginUpload(version=0, source=PathSource(path=log.root))
        log.commit(manifest, "keep", UploadRecord(begin=source, part_bytes=8))
        log.verify(manifest)
        files = sorted(log.folder(0).iterdir())
        assert [path.name for path in files] == ["manifest.json", "upload.json", "weights-00001.safetensors"]
        for path in files:
            sound, damaged = path.read_bytes(), {}
            verify = log.verify if path.suffix == ".safetensors" else log.verify_frame  # faster, for what it checks
            for position in range(len(sound)):
                path.write_bytes(sound[:position] + bytes([sound[position] ^ 4]) + sound[position + 1 :])
                with pytest.raises(LogCorrupt) as found:
                    verify(manifest)
                damaged[position] = found.value.detail
            path.write_bytes(sound)
        for tensor in manifest.tensors:  # of the last file
            where = {"version": 0, "tensor": tensor.name, "chunk": 0, "file": tensor.file}
            assert damaged[tensor.offset] == damaged[tensor.offset + tensor.nbytes - 1] == where
        log.verify(manifest)

    def test_verify_finds_a_file_that_is_cut_off_grown_or_gone(self, log):
        commit(log, 0)
        path, manifest = log.folder(0) / "weights-00001.safetensors", log.manifest(0)
        sound = path.read_bytes()
        for damaged, why in ((sound[:-1], SECOND), (sound + b"!", r"weights-00001\.safetensors has")):
            path.write_bytes(damaged)
            with pytest.raises(LogCorrupt, match=why):
                log.verify(manifest)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            log.verify(manifest)


class TestDrop:
    def test_old_versions_can_be_dropped_but_not_the_newest(self, log):
        for version in (0, 1, 2):
            commit(log, version)
        log.drop(0)
        assert log.versions() == [1, 2] and not log.folder(0).exists()
        with pytest.raises(ValueError, match="version 2 is the newest"):
            log.drop(2)
        log.folder(1).rename(log.root / ".dropped-1")  # half dropped, and removed at the next commit
        assert log.versions() == [2]
        commit(log, 3)
        assert not (log.root / ".dropped-1").exists()


@pytest.fixture
def held_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes a folder as NFS leaves it while a process has a file of it open: ``.nfs…``, which cannot be removed."""
    unlink = os.unlink

    def busy(path: str, *, dir_fd: int | None = None) -> None:
        if Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", busy)
    yield lambda folder: (folder / ".nfs0001").touch()


@pytest.fixture
def unconfirmed(log: WeightLog, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the nth sync of the log's folder from now on fail, as a bad disk does."""

    def fail(nth: int) -> None:
        count, sync = itertools.count(1), durable_io.sync_folder

        def failing(folder: Path) -> None:
            if folder == log.root and next(count) == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(folder)

        for module in (durable_io, log_module):
            monkeypatch.setattr(module, "sync_folder", failing)

    return fail


class TestOpenFiles:
    def test_an_old_version_still_open_is_dropped_and_removed_later(self, log, held_open, monkeypatch):
        commit(log, 0)
        commit(log, 1)
        held_open(log.folder(0))
        log.drop(0)
        assert log.versions() == [1]
        (left,) = log.root.glob(".dropped-*")
        assert [path.name for path in left.iterdir()] == [".nfs0001"]
        commit(log, 2)
        assert log.versions() == [1, 2] and left.exists()
        monkeypatch.undo()  # it is closed
        commit(log, 3)
        assert not left.exists() and log.versions() == [1, 2, 3]

    def test_a_version_replaces_its_crashed_commit_even_if_open(self, log, held_open):
        commit(log, 0)
        for _ in range(2):
            crash_before_latest_is_replaced(log, 1)
            held_open(log.folder(1))
            log.remove_uncommitted()
            assert log.versions() == [0] and not log.folder(1).exists()
        commit(log, 1)
        assert log.versions() == [0, 1] and len(list(log.root.glob(".dropped-1-*"))) == 2


class TestUnconfirmed:
    def test_a_version_in_latest_is_committed_even_if_the_sync_fails(self, log, unconfirmed):
        commit(log, 0)
        unconfirmed(2)
        head = commit(log, 1)
        assert head == log.head() == WeightLog(log.root).head() and log.versions() == [0, 1]
        assert log.unconfirmed[1].errno == errno.EIO
        commit(log, 2)
        assert log.unconfirmed == {}

    def test_a_version_whose_sync_fails_before_latest_stays_staged(self, log, unconfirmed):
        before = commit(log, 0)
        unconfirmed(1)
        manifest = stage(log, 1)
        with pytest.raises(OSError, match="Input/output error"):
            log.commit(manifest, "keep")
        assert log.head() == before and log.versions() == [0] and log.unconfirmed == {}
        assert log.commit(manifest, "keep").version == 1


class TestUnreadable:
    """A file system that fails for a moment, as NFS does, or a process without file descriptors."""

    @pytest.fixture
    def failing(self, log: WeightLog, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
        """Have so many reads of the log fail with an error of the system."""
        commit(log, 0)

        def fail(code: int, times: int) -> None:
            left, read_bytes, listdir = times, Path.read_bytes, os.listdir

            def failed() -> None:
                nonlocal left
                left -= 1
                if left >= 0:
                    raise OSError(code, os.strerror(code))

            monkeypatch.setattr(Path, "read_bytes", lambda path: (failed(), read_bytes(path))[1])
            monkeypatch.setattr(os, "listdir", lambda path: (failed(), listdir(path))[1])

        return fail

    @pytest.mark.parametrize("read", [WeightLog.head, WeightLog.versions, WeightLog.control, WeightLog.origin])
    def test_what_cannot_be_read_for_now_is_no_damage(self, log, failing, read):
        failing(errno.EIO, 1)
        with pytest.raises(LogUnreadable, match="Input/output error"):
            read(log)
        read(log)

    def test_a_stale_file_handle_is_opened_again(self, log, failing):
        failing(errno.ESTALE, 2)
        assert log.versions() == [0]
        failing(errno.ESTALE, 100)
        with pytest.raises(LogUnreadable):
            log.head()

    def test_a_manifest_that_cannot_be_read_is_no_damage(self, log):
        commit(log, 0)
        path = log.folder(0) / MANIFEST_FILE
        path.unlink()
        path.mkdir()
        with pytest.raises(LogUnreadable):
            log.manifest(0)


class TestNoDescriptors:
    @pytest.mark.parametrize(
        ("module", "last", "rename_back_fails"),
        [(os, "rename", False), (os, "rename", True), (log_module, "sync_folder", False)],
        ids=["before the sync", "and the folder stays", "before LATEST is written"],
    )
    def test_a_commit_that_ran_out_of_them_can_be_repeated(self, log, monkeypatch, module, last, rename_back_fails):
        before, manifest = commit(log, 0), stage(log, 1)
        limits, call = resource.getrlimit(resource.RLIMIT_NOFILE), getattr(module, last)

        def last_to_succeed(*paths: Path) -> None:
            if rename_back_fails and paths == (log.folder(1), log.staging(1)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            call(*paths)
            if paths[-1] in (log.folder(1), log.root):
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))

        with monkeypatch.context() as patched:
            patched.setattr(module, last, last_to_succeed)
            try:
                with pytest.raises((OSError, LogUnreadable)):
                    log.commit(manifest, "keep")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert log.head() == before and log.versions() == [0]
        assert log.staging(1).exists() == (last == "rename" and not rename_back_fails)
        assert log.commit(manifest, "keep") == log.head()
        log.verify(manifest)


class TestPrivate:
    @pytest.fixture
    def shared(self) -> Iterator[Path]:
        """A folder where every user may make files, as /dev/shm is."""
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            os.chmod(folder, 0o1777)
            yield Path(folder)

    def test_a_log_is_read_by_its_user_alone(self, shared):
        log = WeightLog(shared / "log")
        with durable_io.WriterLock(log.root).acquire(0):
            commit(log, 0)
        log.sign()
        files = [path for path in log.root.rglob("*") if path.is_file()]
        assert {"LOCK", "LATEST", "ORIGIN", MANIFEST_FILE, "weights-00001.safetensors"} <= {path.name for path in files}
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert stat.S_IMODE(log.root.stat().st_mode) == 0o700

    def test_a_lock_that_is_a_link_is_not_followed(self, shared):
        (shared / "log").mkdir()
        (shared / "precious").write_text("precious")
        (shared / "log" / "LOCK").symlink_to(shared / "precious")
        with pytest.raises(LogLocked, match="LOCK is a symbolic link: it is not used"):
            durable_io.WriterLock(shared / "log").acquire(0)
        assert (shared / "precious").read_text() == "precious"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    @pytest.mark.parametrize("below", ["", "weights"], ids=["the root", "above the root"])
    def test_a_folder_of_another_user_is_refused(self, shared, below):
        (shared / "log" / below).mkdir(parents=True)
        os.chown(shared / "log", 65534, 65534)
        with pytest.raises(LogLocked, match=f"{shared}/log belongs to user 65534"):
            durable_io.WriterLock(shared / "log" / below).acquire(0)


def test_a_copy_replaces_one_that_a_crash_has_half_withdrawn(log, monkeypatch):
    commit(log, 3)
    commit(log, 4)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(log, "_replace", crash)
        with pytest.raises(KeyboardInterrupt):
            log.withdraw(4)
    manifest = stage(log, 4, content=5)
    (log.staging(4) / MANIFEST_FILE).write_bytes(manifest.to_json())
    log.adopt(Head(version=4, digest=manifest.digest), log.staging(4))
    assert log.manifest(4) == manifest


def test_a_digest_that_is_no_number_is_damage_of_the_version(log):
    manifest = stage(log, 1)
    [first, *others] = manifest.tensors
    damaged = manifest.replace(tensors=(replace(first, digest=f"{first.digest[:-1]}~"), *others))
    log.commit(damaged, "keep")
    with pytest.raises(LogCorrupt, match=r"version 1: digest of first.weight is '.*~', which is not hexadecimal"):
        log.verify(log.manifest(1))
