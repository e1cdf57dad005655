"""A log on a disk behind one in memory: what is copied, what a crash of the host leaves, and what each number means."""

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_service.errors import InsufficientStorage, LogCorrupt, VersionConflict
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.protocol.weight_log import Control, Head
from rollout_service.store import durable_io, durable_log, served_numbers
from rollout_service.store import log as log_module
from rollout_service.store.direct_io import BLOCK_BYTES
from rollout_service.store.durable_log import CopyStopped, DurableLog, copy_version, log_to_go_on_with, require_behind
from rollout_service.store.labels import VersionLabels
from rollout_service.store.layout import Layout
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest
from rollout_service.store.writer import VersionWriter
from tests.unit.store.test_log_memory import MAX_FILE_BYTES, SLOTS, manifest_of, numbers
from tests.unit.store.versions import FIRST, commit, flip_a_byte, stage


@pytest.fixture
def memory_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "log"


class Host:
    """A log in memory and one on a disk, which outlives it; ``start`` as an ingest does."""

    def __init__(self, memory_root: Path, disk_root: Path, keep: int = 2) -> None:
        self._roots, self._keep = (memory_root, disk_root), keep

    def start(self) -> None:
        """A process begins."""
        memory_root, disk_root = self._roots
        memory_root.mkdir(exist_ok=True)
        self.memory = WeightLog(memory_root, disk_root)
        self.disk = DurableLog(disk_root, self.memory, self._keep)
        self.disk.recover()
        self.memory.sign()

    def serve(self, version: int, content: int | None = None, label: str | None = None) -> Head:
        """Commit a version in memory, as an ingest does."""
        manifest = stage(self.memory, version, content=content).replace(label=label)
        self.disk.served.note(version, manifest.digest)
        return self.memory.commit(manifest, "wait")

    def crash(self) -> None:
        """The machine loses its memory and starts again."""
        shutil.rmtree(self._roots[0])
        self.start()


@pytest.fixture
def host(memory_root: Path, tmp_path: Path) -> Host:
    host = Host(memory_root, tmp_path / "disk")
    host.start()
    return host


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestCopy:
    def test_a_copy_is_the_version_byte_for_byte_and_a_log_by_itself(self, host: Host) -> None:
        head = host.serve(0)
        assert host.disk.versions == set() and host.disk.newest is None
        host.disk.copy(0)
        assert host.disk.versions == {0} and host.disk.newest == 0
        found = WeightLog(host.disk.log.root)
        assert found.head() == head
        found.verify(found.manifest(0))
        assert files_of(found.folder(0)) == files_of(host.memory.folder(0))

    @pytest.mark.parametrize("piece_bytes", [1 << 20, 3 << 20, 16 << 20])
    def test_files_of_any_length_are_written_in_whole_blocks(
        self, host: Host, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(durable_log, "PIECE_BYTES", piece_bytes)
        manifest = several_files(host.memory)
        sizes = [path.stat().st_size for path in host.memory.folder(1).glob("*.safetensors")]
        assert len(sizes) == 3 and any(size % BLOCK_BYTES for size in sizes) and max(sizes) > 2 << 20
        host.disk.copy(1)
        assert files_of(host.disk.log.folder(1)) == files_of(host.memory.folder(1))
        host.disk.log.verify(manifest)

    def test_what_is_damaged_in_memory_is_not_copied(self, host: Host) -> None:
        host.serve(0)
        host.disk.copy(0)
        host.serve(1)
        flip_a_byte(host.memory, 1, FIRST)
        with pytest.raises(LogCorrupt, match=FIRST):
            host.disk.copy(1)
        assert host.disk.versions == {0} and host.disk.log.versions() == [0]
        assert list((host.disk.log.root / "staging").iterdir()) == []

    def test_a_copy_that_is_stopped_leaves_nothing(self, host: Host) -> None:
        host.serve(0)
        with pytest.raises(CopyStopped):
            host.disk.copy(0, lambda: True)
        assert host.disk.versions == set() and host.disk.log.versions() == []
        host.disk.copy(0)
        assert host.disk.versions == {0}

    def test_an_older_version_does_not_become_the_newest(self, host: Host) -> None:
        for version in (0, 1, 2):
            host.serve(version)
        host.disk.copy(2)
        host.disk.copy(1)
        assert host.disk.versions == {1, 2} and host.disk.newest == 2
        head = host.disk.log.head()
        assert head is not None and head.version == 2

    def test_as_many_stay_as_are_kept_and_the_one_that_was_copied_now(self, host: Host) -> None:
        for version in range(5):
            host.serve(version)
        for version in (2, 3, 4):
            host.disk.copy(version)
        assert host.disk.versions == {3, 4} == set(host.disk.log.versions())
        host.disk.copy(1)  # somebody waits for it
        assert host.disk.versions == {1, 3, 4}
        host.serve(5)
        host.disk.copy(5)
        assert host.disk.versions == {4, 5} == set(host.disk.log.versions())

    def test_what_the_disk_does_not_confirm_is_not_durable_and_is_copied_anew(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host.serve(0)
        host.disk.copy(0)
        host.serve(1)
        failing = Failing(durable_io.sync_folder, host.disk.log.root, nth=2)
        with monkeypatch.context() as patch:
            for module in (durable_io, log_module):
                patch.setattr(module, "sync_folder", failing)
            with pytest.raises(OSError, match="Input/output error"):
                host.disk.copy(1)
        assert host.disk.versions == {0}
        host.disk.copy(1)
        assert host.disk.versions == {0, 1}
        host.disk.log.verify(host.disk.log.manifest(1))

    def test_a_full_disk_leaves_the_versions_before(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        host.serve(0)
        host.disk.copy(0)
        host.serve(1)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(durable_log.DirectFile, "write", full)
            with pytest.raises(OSError, match="No space left"):
                host.disk.copy(1)
        assert host.disk.versions == {0} and host.disk.log.versions() == [0]
        host.disk.copy(1)
        assert host.disk.versions == {0, 1}

    def test_scales_that_are_measured_after_the_copy_reach_it(self, host: Host) -> None:
        host.serve(0)
        host.disk.copy(0)
        assert list(host.memory.folders(0)) == [host.memory.folder(0), host.disk.log.folder(0)]
        host.serve(1)
        assert list(host.memory.folders(1)) == [host.memory.folder(1)]


class TestCrash:
    def test_the_newest_durable_version_is_restored(self, host: Host) -> None:
        host.serve(0)
        five = host.serve(5, label="run/step-5")
        host.disk.copy(5)
        origin = host.memory.origin()
        host.serve(6)
        host.crash()
        assert host.memory.head() == five and host.memory.versions() == [5]
        assert host.disk.versions == {5}
        host.memory.verify(host.memory.manifest(5))
        assert files_of(host.memory.folder(5)) == files_of(host.disk.log.folder(5))
        now = host.memory.origin()
        assert origin is not None and now is not None and now.log == origin.log and now.writer != origin.writer

    def test_a_number_that_was_served_stands_for_its_digest(self, host: Host) -> None:
        host.serve(0)
        host.disk.copy(0)
        six, seven = host.serve(6), host.serve(7)
        host.crash()
        assert host.disk.served.digests == {6: six.digest, 7: seven.digest} and host.disk.served.newest == 7
        assert host.disk.served.lost == {6, 7}
        with pytest.raises(VersionConflict, match=r"version 6 was served with the digest .* push .* as version 'next'"):
            host.serve(6, content=99)
        shutil.rmtree(host.memory.staging(6))
        assert host.serve(6) == six
        host.disk.copy(6)
        assert host.disk.served.digests == {7: seven.digest}
        host.crash()
        with pytest.raises(VersionConflict, match="version 7 was served"):
            host.serve(7, content=99)

    def test_a_process_that_ends_forgets_no_number_that_a_crash_took_before(self, host: Host) -> None:
        host.serve(0)
        host.disk.copy(0)
        five = host.serve(5)
        host.crash()
        three = host.serve(3)
        host.disk.served.note(4, "of a commit that was never made")
        host.start()
        assert host.disk.served.digests == {3: three.digest, 5: five.digest} and host.disk.served.lost == {5}

    def test_what_operator_replicas_and_labels_said_is_there_again(self, host: Host) -> None:
        host.serve(0)
        control = Control(paused=True, order="1")
        choice = KVCacheChoice(dtype="fp8_e4m3", why="measured", judged_by="one")
        host.memory.set_control(control)
        host.memory.set_kv_cache(choice)
        host.memory.set_fleet(frozenset({"a", "b"}))
        labels = VersionLabels(host.memory)
        for version in (1, 2):
            host.serve(version, label=f"run/{version}")
            labels.note(version, f"run/{version}")
        host.disk.copy(2)
        host.serve(3, label="run/3")
        labels.note(3, "run/3")
        host.crash()
        assert (host.memory.control(), host.memory.kv_cache(), host.memory.fleet()) == (control, choice, {"a", "b"})
        known = VersionLabels(host.memory)
        known.load()
        assert known.number_of("run/1") == 1 and known.number_of("run/2") == 2
        with pytest.raises(Exception, match="no version has the label 'run/3'"):
            known.number_of("run/3")

    def test_a_process_that_ends_loses_nothing(self, host: Host) -> None:
        host.serve(0)
        host.disk.copy(0)
        two = host.serve(2)
        host.disk.served.note(3, "of a commit that was never made")
        host.start()
        assert host.memory.head() == two and host.memory.versions() == [0, 2] and host.disk.versions == {0}
        assert host.disk.served.digests == {2: two.digest}
        host.serve(3, content=99)

    def test_a_copy_that_was_killed_is_begun_anew(self, host: Host) -> None:
        host.serve(0)
        copy_version(host.memory.folder(0), host.memory.manifest(0), host.disk.log.staging(0), lambda: False)
        host.start()
        assert host.disk.versions == set() and not host.disk.log.staging(0).parent.exists()
        host.disk.copy(0)
        assert host.disk.versions == {0}

    def test_the_first_copy_killed_between_its_renames_counts_as_none(self, host: Host) -> None:
        host.serve(4)
        copy_version(host.memory.folder(4), host.memory.manifest(4), host.disk.log.folder(4), lambda: False)
        host.start()
        assert host.disk.versions == set() and host.disk.log.versions() == []
        copy_version(host.memory.folder(4), host.memory.manifest(4), host.disk.log.folder(4), lambda: False)
        host.crash()
        assert host.memory.head() is None and host.disk.served.newest == 4

    def test_a_disk_whose_latest_was_removed_is_not_taken_for_empty(self, host: Host) -> None:
        host.serve(4)
        host.disk.copy(4)
        (host.disk.log.root / "LATEST").unlink()
        with pytest.raises(LogCorrupt, match="but no LATEST"):
            host.crash()
        assert host.disk.log.folder(4).is_dir()

    def test_a_crash_while_a_version_is_restored_is_no_damage(self, host: Host) -> None:
        host.serve(4)
        host.disk.copy(4)
        host.crash()
        (host.memory.root / "LATEST").unlink()
        host.start()
        assert host.memory.versions() == [4]
        host.memory.verify(host.memory.manifest(4))

    def test_a_damaged_version_on_the_disk_ends_the_start(self, host: Host) -> None:
        host.serve(4)
        host.disk.copy(4)
        flip_a_byte(host.disk.log, 4, FIRST)
        with pytest.raises(LogCorrupt, match=FIRST):
            host.crash()

    def test_a_memory_that_is_too_small_is_told_with_numbers(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        host.serve(4)
        host.disk.copy(4)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(durable_log.DirectFile, "write", full)
            with pytest.raises(
                InsufficientStorage, match=rf"version 4, which is read from {host.disk.log.root}, needs"
            ):
                host.crash()
        assert not host.memory.staging(4).exists()
        host.start()
        assert host.memory.versions() == [4]

    def test_what_an_ingest_on_another_machine_has_served_since_counts(
        self, host: Host, memory_root: Path, tmp_path: Path
    ) -> None:
        host.serve(0)
        host.disk.copy(0)
        host.serve(1)
        other = Host(memory_root.with_name("of another machine"), tmp_path / "disk")
        other.start()
        assert other.memory.versions() == [0]
        two = other.serve(2)
        other.disk.copy(2)
        three = other.serve(3)
        other.memory.set_control(Control(paused=True))
        host.start()  # here again, with what was served here long ago
        assert host.memory.head() == two and host.memory.versions() == [2] and host.memory.control().paused
        assert host.disk.served.digests == {3: three.digest}
        host.start()
        assert host.memory.versions() == [2]

    def test_a_rollback_on_the_disk_counts_if_it_is_newer(self, host: Host) -> None:
        host.serve(1)
        host.disk.copy(1)
        newer = commit(host.disk.log, 2, content=77)
        host.disk.log.set_control(Control(paused=True))
        host.start()
        assert host.memory.head() == newer and host.memory.versions() == [1, 2] and host.memory.control().paused


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_no_durable_version_is_lost_and_no_number_means_two_digests(host: Host, seed: int) -> None:
    chance, served, noted = random.Random(seed), dict[int, str](), set[int]()
    newest = durable = -1
    for step in range(40):
        what = chance.choices(["serve", "copy", "end", "end in a commit", "crash"], [12, 8, 2, 1, 4])[0]
        if what == "serve":
            version = newest + chance.choice([1, 1, 2])
            shutil.rmtree(host.memory.staging(version), ignore_errors=True)
            try:
                digest = host.serve(version, content=chance.choice([1, 2])).digest
            except VersionConflict:
                assert version in served | dict.fromkeys(noted)
                continue
            assert served.setdefault(version, digest) == digest, f"step {step}"
            newest = version
        elif what == "copy" and newest >= 0:
            version = chance.choice(host.memory.versions()[-2:])
            host.disk.copy(version)
            assert version in host.disk.versions
            durable = max(durable, version)
        elif what.startswith("end"):
            if what == "end in a commit" and newest + 1 not in served:
                noted.add(newest + 1)
                host.disk.served.forget(newest + 1)
                host.disk.served.note(newest + 1, "of a version that nobody has served")
            host.start()
            assert newest < 0 or host.memory.versions()[-1] == newest
        elif what == "crash":
            host.crash()
            newest = durable
            found = host.memory.head()
            assert (-1 if found is None else found.version) == durable, f"step {step}"
            if found is not None:
                assert found.digest == served[durable]
                host.memory.verify(host.memory.manifest(durable))


class TestTwoLogs:
    def test_logs_of_two_services_are_not_mixed(self, host: Host, memory_root: Path, tmp_path: Path) -> None:
        host.serve(0)
        other = Host(memory_root.with_name("other"), tmp_path / "other")
        other.start()
        other.serve(0)
        other.disk.copy(0)
        with pytest.raises(LogCorrupt, match=r"are two different logs, .* empty the one that is not meant"):
            Host(memory_root, tmp_path / "other").start()

    def test_a_backup_that_was_restored_into_one_of_them_is_told(self, host: Host) -> None:
        host.serve(0)
        host.disk.copy(0)
        host.disk.log.withdraw(0)
        commit(host.disk.log, 0, content=77)
        with pytest.raises(LogCorrupt, match=r"hold version 0 with different digests, .* as after a backup"):
            host.start()

    def test_a_log_in_memory_that_is_given_a_disk_goes_on(self, memory_root: Path, tmp_path: Path) -> None:
        log = WeightLog(memory_root)
        log.sign()
        for version in (3, 4):
            commit(log, version)
        log.set_control(Control(paused=True))
        host = Host(memory_root, tmp_path / "disk")
        host.start()
        assert host.disk.versions == set() and set(host.disk.served.digests) == {3, 4}
        host.disk.copy(4)
        host.crash()
        assert host.memory.versions() == [4] and host.memory.control().paused

    def test_a_service_goes_on_with_what_is_in_memory_or_else_on_the_disk(
        self, host: Host, memory_root: Path, tmp_path: Path
    ) -> None:
        assert log_to_go_on_with(memory_root, None).root == memory_root
        assert log_to_go_on_with(memory_root, tmp_path / "disk").root == tmp_path / "disk"
        host.serve(0)
        assert log_to_go_on_with(memory_root, tmp_path / "disk").root == memory_root


class TestRoots:
    def test_a_tmpfs_is_not_durable(self, memory_root: Path, tmp_path: Path) -> None:
        memory_root.mkdir()
        require_behind(memory_root, tmp_path)
        with pytest.raises(ValueError, match=r"weights.durable_root is .* on a tmpfs, which is gone with the machine"):
            require_behind(tmp_path, memory_root)

    def test_two_folders_of_one_disk_gain_nothing(self, tmp_path: Path) -> None:
        for name in ("root", "durable"):
            (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=r"on one file system, .* below /dev/shm, .* before_live"):
            require_behind(tmp_path / "root", tmp_path / "durable")


class TestServedNumbers:
    def test_too_many_that_are_not_on_the_disk_end_the_commits(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served_numbers, "MOST_SERVED", 2)
        host.serve(0)
        host.serve(1)
        with pytest.raises(InsufficientStorage, match="2 versions have been served since the last one that is on"):
            host.serve(2)
        host.disk.copy(1)
        host.disk.served.note(2, "digest")

    def test_a_version_that_was_not_served_after_all_is_forgotten(self, host: Host) -> None:
        host.disk.served.note(3, "one")
        host.disk.served.forget(3)
        host.disk.served.note(3, "another")
        assert WeightLog(host.disk.log.root).served().digests == {3: "another"}

    def test_nothing_is_noted_that_the_disk_did_not_take(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(log_module, "replace_synced", failing)
            with pytest.raises(OSError, match="Input/output error"):
                host.disk.served.note(3, "one")
            patch.undo()
            patch.setattr(durable_io, "sync_folder", Failing(durable_io.sync_folder, host.disk.log.root, nth=1))
            with pytest.raises(OSError, match="Input/output error"):
                host.disk.served.note(3, "one")
        assert host.disk.served.digests == {}
        host.disk.served.note(3, "another")


class Failing:
    """``sync_folder`` whose nth call for one folder fails, as a bad disk's does."""

    def __init__(self, sync: Callable[[Path], None], folder: Path, nth: int) -> None:
        self._sync, self._folder, self._left = sync, folder, nth

    def __call__(self, folder: Path) -> None:
        self._left -= folder == self._folder
        if folder == self._folder and self._left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(folder)


def several_files(log: WeightLog) -> Manifest:
    """Version 1, in files of different lengths."""
    folder = log.staging(1)
    folder.mkdir(parents=True)
    writer = VersionWriter(folder, Layout(SLOTS, MAX_FILE_BYTES))
    for slot in SLOTS:
        writer.write(slot.name, numbers(1, slot.name).data)
    manifest = manifest_of(1, writer.finish())
    log.commit(manifest, "keep")
    return manifest
