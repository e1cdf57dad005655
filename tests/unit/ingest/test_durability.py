"""Versions that are served from memory and copied to a disk behind: what is durable when, and what a crash takes."""

import asyncio
import errno
import os
import shutil
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    CommitTimeout,
    InsufficientStorage,
    InvalidRequest,
    LogCorrupt,
    LogLocked,
    RolloutServiceError,
    VersionConflict,
)
from rollout_service.ingest import durability
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.kv_scales import KVMeasurement
from rollout_service.protocol.upload import Announcement, CommitUpload, RollBack
from rollout_service.store import durable_log, served_numbers
from rollout_service.store.direct_io import DirectFile
from rollout_service.store.durable_log import CopyStopped, DurableLog
from rollout_service.store.log import WeightLog
from tests.support.moments import stop_at
from tests.unit.ingest.test_ingest_metrics import LAYER, NO_ERROR
from tests.unit.ingest.trainer import Trainer, Weights, begin_of, changed, config_of, replica, settle

PROJECT = Path(__file__).parents[3]
DURABLE = CommitUpload(wait="durable", timeout_s=60.0)


@pytest.fixture
def memory_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "log"


@pytest.fixture
def disk(tmp_path: Path) -> WeightLog:
    """The log behind."""
    return WeightLog(tmp_path / "disk")


@pytest.fixture
def config(model: Path, memory_root: Path, disk: WeightLog) -> ServiceConfig:
    return behind(model, memory_root, disk)


def behind(model: Path, memory_root: Path, disk: WeightLog, **sections: dict[str, object]) -> ServiceConfig:
    weights = {"durability": "behind", "durable_root": disk.root}
    return config_of(model, memory_root, weights=weights, scaling={"drain_timeout_s": 0.01}, **sections)


def patient(config: ServiceConfig) -> ServiceConfig:
    """An orderly end may take as long as it wants."""
    return config.model_copy(update={"scaling": config.scaling.model_copy(update={"drain_timeout_s": 3600.0})})


class SlowDisk:
    """Copies wait until ``open``; which ones were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self._may, self._copy = threading.Event(), DurableLog.copy
        monkeypatch.setattr(DurableLog, "copy", self._wait_and_copy())

    def open(self) -> None:
        """From now on the disk is fast."""
        self._may.set()

    def close(self) -> None:
        """And slow again."""
        self._may.clear()

    def _wait_and_copy(self) -> Callable[[DurableLog, int, Callable[[], bool]], None]:
        def copy(log: DurableLog, version: int, stopped: Callable[[], bool]) -> None:
            self.begun.append(version)
            while not self._may.wait(0.01):
                if stopped():
                    raise CopyStopped
            self._copy(log, version, stopped)

        return copy


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.open()


Start = Callable[..., Awaitable[Ingest]]


@pytest.fixture
async def start(config: ServiceConfig) -> AsyncIterator[Start]:
    """An ingest; those that it makes are ended."""
    made: list[Ingest] = []

    async def start(other: ServiceConfig | None = None) -> Ingest:
        made.append(Ingest(other or config))
        await made[-1].start()
        return made[-1]

    yield start
    for ingest in made:
        await ingest.stop()


class Killed(NamedTuple):
    """What a real ingest process has left that was killed while a version was served and its copy had begun."""

    version: int
    memory: Path
    disk: Path

    def put_back(self, config: ServiceConfig, disk: WeightLog) -> int:
        """Where the next ingest finds it; returns the version."""
        shutil.copytree(self.memory, config.weights.root)
        shutil.copytree(self.disk, disk.root)
        return self.version


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        disk = tmp_path_factory.mktemp("killed") / "disk"
        yield Killed(
            asyncio.run(killed_before_it_is_durable(model, WeightLog(Path(memory)), WeightLog(disk))),
            Path(memory),
            disk,
        )


def lose_the_memory(config: ServiceConfig) -> None:
    """As the machine does that crashes."""
    shutil.rmtree(config.weights.root)


async def durable(ingest: Ingest) -> list[int]:
    return [status.version for status in await ingest.versions() if status.durable]


class TestLiveBeforeDurable:
    async def test_a_version_is_served_before_it_is_on_the_disk(
        self, slow: SlowDisk, start: Start, weights: Weights, disk: WeightLog
    ) -> None:
        ingest = await start()
        pushed = await Trainer(ingest).push(1, weights)
        assert pushed.state == "committed" and not pushed.durable and pushed.error is None
        desired = await ingest.sync(replica("a", 0), None)
        assert desired.version == 1 and disk.head() is None
        assert disk.served().digests == {0: (await ingest.status(0)).digest, 1: pushed.digest}
        await ingest.report(replica("a", 1, digest=desired.digest, log=desired.origin and desired.origin.log))
        assert (await ingest.status(1)).state == "live" and not (await ingest.status(1)).durable
        waiting = asyncio.create_task(ingest.commit(1, DURABLE))
        await settle()
        assert not waiting.done()
        slow.open()
        assert (await waiting).durable
        disk.verify(disk.manifest(1, pushed.digest))
        assert disk.served().digests == {}

    async def test_versions_that_come_faster_than_the_disk_are_overtaken(
        self, slow: SlowDisk, start: Start, weights: Weights, disk: WeightLog
    ) -> None:
        ingest = await start()
        await ingest.report(replica("a", 0))
        for version in range(1, 5):
            await Trainer(ingest).push(version, changed(weights, version / 64))
            await ingest.report(replica("a", version, sequence=version))
        # 0 is being copied, and must not be dropped under the copy; of the others two are kept
        assert [status.version for status in await ingest.versions()] == [0, 3, 4]
        slow.open()
        assert (await ingest.commit(4, DURABLE)).durable
        assert slow.begun == [0, 4] and disk.versions() == [0, 4]
        assert [(s.version, s.durable) for s in await ingest.versions()] == [(0, True), (3, False), (4, True)]
        await Trainer(ingest).push(5, weights)
        await ingest.commit(5, DURABLE)
        state = (await ingest.state()).durable
        assert state is not None and (state.version, state.never_durable) == (5, 3)
        assert disk.versions() == [4, 5]

    async def test_copying_outlives_an_error_that_nobody_expects(
        self, start: Start, weights: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def no_descriptors(self: Ingest) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(Ingest, "_remove_copied", no_descriptors)
        ingest = await start()
        await Trainer(ingest).push(1, weights)
        assert (await ingest.commit(1, DURABLE)).durable
        copy = DurableLog.copy

        def fail(self: DurableLog, version: int, stopped: Callable[[], bool] = lambda: False) -> None:
            monkeypatch.setattr(DurableLog, "copy", copy)
            raise ValueError("nobody expects this")

        monkeypatch.setattr(DurableLog, "copy", fail)
        await Trainer(ingest).push(2, changed(weights, 0.5))
        while (error := (await ingest.status(2)).error) is None:
            await asyncio.sleep(0.01)
        assert "nobody expects this" in error.message and "tried again" in error.message
        assert (await ingest.commit(2, DURABLE)).durable
        ingest.check_tasks()

    async def test_a_copying_task_that_has_ended_is_seen_by_the_health_check(self, start: Start) -> None:
        ingest = await start()
        ingest.check_tasks()
        assert ingest._durability._task is not None
        ingest._durability._task.cancel()
        await asyncio.wait([ingest._durability._task])
        with pytest.raises(RolloutServiceError, match="no version becomes durable any more"):
            ingest.check_tasks()

    async def test_an_ingest_with_its_memory_prepared_is_healthy(self, start: Start) -> None:
        ingest = await start()
        preparing = [task for task in ingest._background if task is not ingest._expiring]
        await asyncio.wait(preparing)
        ingest.check_tasks()

    async def test_an_expiring_task_that_has_ended_is_seen(self, start: Start) -> None:
        ingest = await start()
        assert ingest._expiring is not None
        ingest._expiring.cancel()
        await asyncio.wait([ingest._expiring])
        with pytest.raises(RolloutServiceError, match="staged versions do not expire any more"):
            ingest.check_tasks()

    async def test_a_version_that_somebody_waits_for_is_not_overtaken(
        self, slow: SlowDisk, start: Start, weights: Weights, disk: WeightLog
    ) -> None:
        ingest = await start()
        await ingest.report(replica("a", 0))
        await Trainer(ingest).upload(1, weights)
        waiting = asyncio.create_task(ingest.commit(1, DURABLE))
        for version in range(2, 5):
            await Trainer(ingest).push(version, changed(weights, version / 64))
            await ingest.report(replica("a", version, sequence=version))
        slow.open()
        assert (await waiting).durable
        await ingest.commit(4, DURABLE)
        await ingest.stop()  # what is too old is removed after the new one is durable
        assert slow.begun == [0, 1, 4] and disk.versions() == [1, 4]

    async def test_the_newest_version_is_written_before_an_orderly_end(
        self, slow: SlowDisk, start: Start, config: ServiceConfig, weights: Weights, disk: WeightLog
    ) -> None:
        ingest = await start(patient(config))
        await Trainer(ingest).push(1, weights)
        ending = asyncio.create_task(ingest.stop())
        await settle()
        slow.open()
        await ending
        assert disk.versions() == [0, 1]

    async def test_scales_that_are_measured_later_are_durable_too(
        self, start: Start, model: Path, memory_root: Path, disk: WeightLog
    ) -> None:
        ingest = await start(behind(model, memory_root, disk, kv_cache={"scales_policy": "calibrate"}))
        await ingest.commit(0, DURABLE)
        seen = KVMeasurement(amax={LAYER: ((448.0, 448.0, 448.0),)}, errors={LAYER: NO_ERROR}, tokens=64)
        result = await ingest.kv.publish_result(0, "a", [seen])
        await ingest.stop()
        shutil.rmtree(memory_root)
        again = await start(behind(model, memory_root, disk, kv_cache={"scales_policy": "calibrate"}))
        assert await again.kv.request_lease(0, "b") == result
        assert (await again.status(0)).kv_scales_from == "calibrate"


class TestCrash:
    async def test_a_process_that_is_killed_loses_nothing_and_the_copying_goes_on(
        self, killed: Killed, start: Start, config: ServiceConfig, disk: WeightLog
    ) -> None:
        version = killed.put_back(config, disk)
        ingest = await start()
        assert (await ingest.fleet()).latest_version == version
        assert (await ingest.commit(version, DURABLE)).durable
        disk.verify(disk.manifest(version))
        assert list((disk.root / "staging").iterdir()) == []

    async def test_a_host_that_crashes_loses_what_was_not_durable_and_no_number(
        self, killed: Killed, start: Start, config: ServiceConfig, weights: Weights, disk: WeightLog
    ) -> None:
        version = killed.put_back(config, disk)
        lost, head = WeightLog(config.weights.root).manifest(version).digest, disk.head()
        lose_the_memory(config)
        ingest = await start()
        assert head is not None and (await ingest.fleet()).latest_version == head.version < version
        assert await durable(ingest) == disk.versions()
        restored = WeightLog(config.weights.root)
        restored.verify(restored.manifest(head.version, head.digest))
        assert disk.served().digests == {version: lost}

        trainer = Trainer(ingest)
        with pytest.raises(VersionConflict, match=rf"version {version} was served with the digest {lost}") as refused:
            await trainer.push(version, changed(weights, 1 / 64))
        assert refused.value.detail["digests"][0] == lost  # type: ignore[index]
        next_one = await ingest.begin(
            Announcement(version="next", tensors=begin_of(0, weights).tensors, uploader="a trainer that begins anew")
        )
        assert next_one.version == version + 1
        await ingest.discard(next_one.version)
        await ingest.discard(version)
        again = await trainer.push(version, weights)
        assert again.digest == lost and (await ingest.commit(version, DURABLE)).durable

    async def test_a_folder_or_a_broadcast_is_never_given_the_number_of_a_lost_version(
        self, slow: SlowDisk, start: Start, config: ServiceConfig, model: Path, weights: Weights, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(model, tmp_path / "step_7")
        roots = config.weights.model_copy(update={"source_roots": (folder,)})
        ingest = await start(config.model_copy(update={"weights": roots}))
        slow.open()
        await ingest.commit(0, DURABLE)
        slow.close()
        await Trainer(ingest).push(7, changed(weights, 1 / 64))
        await ingest.stop()
        lose_the_memory(config)
        again = await start(config.model_copy(update={"weights": roots}))
        assert (await again.fleet()).latest_version == 0
        broadcast = await again.begin_broadcast()
        assert await again._number_broadcast(broadcast, "7") == 8
        await again.drop_broadcast(broadcast)
        assert (await again.push_folder(folder, CommitUpload(), number=7)).version == 8

    async def test_a_trainer_that_took_durable_for_an_answer_has_lost_nothing(
        self, slow: SlowDisk, start: Start, config: ServiceConfig, weights: Weights
    ) -> None:
        ingest = await start()
        slow.open()
        trainer = Trainer(ingest)
        await trainer.upload(3, weights)
        answer = await ingest.commit(3, DURABLE)
        slow.close()
        await trainer.push(4, changed(weights, 1 / 64))
        await ingest.stop()
        lose_the_memory(config)
        again = await start()
        found = await again.status(3)
        assert (found.digest, found.durable, found.uploaded_bytes) == (answer.digest, True, answer.uploaded_bytes)

    async def test_before_live_on_the_same_disk_keeps_to_the_numbers(
        self, slow: SlowDisk, start: Start, config: ServiceConfig, model: Path, weights: Weights, disk: WeightLog
    ) -> None:
        ingest = await start()
        slow.open()
        await ingest.commit(0, DURABLE)
        slow.close()
        await Trainer(ingest).push(1, weights)
        await ingest.stop()
        lose_the_memory(config)
        again = await start(config_of(model, disk.root))
        with pytest.raises(VersionConflict, match="version 1 was served with the digest"):
            await Trainer(again).push(1, changed(weights, 1 / 64))
        pushed = await Trainer(again).push(2, weights)
        assert pushed.durable and (await again.status(0)).durable


class TestRollback:
    async def test_a_version_that_is_on_the_disk_alone_is_read_from_there(
        self, start: Start, config: ServiceConfig, weights: Weights, disk: WeightLog
    ) -> None:
        kept = config.model_copy(update={"weights": config.weights.model_copy(update={"keep_versions": 3})})
        ingest = await start(kept)
        for version in (1, 2):
            await Trainer(ingest).push(version, changed(weights, version / 64))
            await ingest.commit(version, DURABLE)
        before = await ingest.status(1)
        await ingest.stop()
        lose_the_memory(config)
        again = await start(kept)
        assert WeightLog(config.weights.root).versions() == [2]
        assert [status.version for status in await again.versions()] == [0, 1, 2]
        assert (await again.status(1)) == before.model_copy(update={"replicas": ()})
        status = await again.roll_back(RollBack(to=1, wait="durable", timeout_s=60.0))
        assert (status.version, status.rollback_of, status.durable) == (3, 1, True)
        assert status.digest == before.digest
        disk.verify(disk.manifest(3))


class TestDisk:
    async def test_a_full_disk_is_told_and_tried_again(
        self, start: Start, weights: Weights, disk: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest = await start()
        await ingest.commit(0, DURABLE)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(durable_log.DirectFile, "write", full)
            await Trainer(ingest).push(1, weights)
            with pytest.raises(
                CommitTimeout, match=rf"not durable in {disk.root} .*No space left on device.*tried again"
            ):
                await ingest.commit(1, CommitUpload(wait="durable", timeout_s=0.3))
            status = await ingest.status(1)
            assert not status.durable and status.error is not None and "No space left" in status.error.message
            assert (await ingest.status(0)).error is None
        status = await ingest.commit(1, DURABLE)
        assert status.durable and status.error is None

    async def test_a_copy_that_failed_is_tried_again_though_nothing_comes(
        self, start: Start, weights: Weights, disk: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(durability, "RETRY_S", 0.01)
        ingest = await start()
        await ingest.commit(0, DURABLE)
        write, failures = durable_log.DirectFile.write, iter([errno.ENOSPC, errno.EIO])

        def failing_twice(file: DirectFile, buffer: memoryview, nbytes: int, offset: int) -> None:
            if error := next(failures, None):
                raise OSError(error, os.strerror(error))
            write(file, buffer, nbytes, offset)

        monkeypatch.setattr(durable_log.DirectFile, "write", failing_twice)
        await Trainer(ingest).push(1, weights)
        assert await ingest._changes.wait(lambda: ingest._durability.is_durable(1), 60.0)
        assert next(failures, None) is None and (await ingest.status(1)).error is None
        disk.verify(disk.manifest(1))

    async def test_a_disk_that_takes_nothing_does_not_hold_up_the_end(
        self, start: Start, config: ServiceConfig, weights: Weights, disk: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest = await start(patient(config))
        await ingest.commit(0, DURABLE)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(durable_log.DirectFile, "write", full)
        await Trainer(ingest).push(1, weights)
        async with asyncio.timeout(60):
            await ingest.stop()
        assert disk.versions() == [0] and WeightLog(config.weights.root).versions() == [0, 1]

    async def test_nothing_is_committed_whose_number_the_disk_does_not_take(
        self, start: Start, weights: Weights, disk: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingest = await start()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(served_numbers.WeightLog, "set_served", full)
            with pytest.raises(InsufficientStorage, match=rf"the number of version 1, .* and {disk.root} has"):
                await Trainer(ingest).push(1, weights)
        assert (await ingest.fleet()).latest_version == 0 and (await ingest.status(1)).state == "staged"
        assert (await ingest.commit(1, DURABLE)).durable

    async def test_what_is_damaged_in_memory_is_told_to_who_waits(
        self, slow: SlowDisk, start: Start, config: ServiceConfig, weights: Weights
    ) -> None:
        ingest = await start()
        await Trainer(ingest).push(1, weights)
        [path] = (config.weights.root / "1").glob("*.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        slow.open()
        with pytest.raises(LogCorrupt, match="hashes to"):
            await ingest.commit(1, DURABLE)
        status = await ingest.status(1)
        assert status.error is not None and "it is not tried again" in status.error.message
        await Trainer(ingest).push(2, weights)
        assert (await ingest.commit(2, DURABLE)).durable

    async def test_one_writer_for_the_disk(
        self, start: Start, config: ServiceConfig, model: Path, disk: WeightLog
    ) -> None:
        await start()
        with tempfile.TemporaryDirectory(dir="/dev/shm") as other, pytest.raises(LogLocked, match=str(disk.root)):
            await start(behind(model, Path(other), disk))

    async def test_what_is_no_disk_ends_the_start(
        self, start: Start, model: Path, memory_root: Path, tmp_path: Path
    ) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as other, pytest.raises(ValueError, match="on a tmpfs"):
            await start(behind(model, tmp_path / "log", WeightLog(Path(other) / "disk")))
        with pytest.raises(ValueError, match="on one file system"):
            await start(behind(model, tmp_path / "log", WeightLog(tmp_path / "disk")))

    async def test_a_log_of_another_model_on_the_disk_is_not_read(
        self, start: Start, config: ServiceConfig, tied_model: Path, memory_root: Path, disk: WeightLog
    ) -> None:
        ingest = await start()
        await ingest.commit(0, DURABLE)
        await ingest.stop()
        lose_the_memory(config)
        with pytest.raises(LogCorrupt, match=rf"the log at {disk.root} holds version 0 of another model"):
            await start(behind(tied_model, memory_root, disk))
        assert not (memory_root / "LATEST").exists()


class TestWithoutADiskBehind:
    async def test_a_log_on_a_disk_is_durable_with_its_commit(
        self, start: Start, model: Path, tmp_path: Path, weights: Weights
    ) -> None:
        ingest = await start(config_of(model, tmp_path / "log"))
        assert (await Trainer(ingest).push(1, weights)).durable
        await Trainer(ingest).upload(2, weights)
        assert (await ingest.commit(2, DURABLE)).durable
        state = (await ingest.state()).durable
        assert state is not None and (state.version, state.log_bytes) == (2, None)

    async def test_a_log_in_memory_alone_is_never_durable_and_refuses_to_wait(
        self, start: Start, model: Path, memory_root: Path, weights: Weights
    ) -> None:
        ingest = await start(config_of(model, memory_root))
        await Trainer(ingest).upload(1, weights)
        with pytest.raises(InvalidRequest, match=r"no version becomes durable here: .* Nothing was committed: ask"):
            await ingest.commit(1, DURABLE)
        assert (await ingest.fleet()).latest_version == 0
        with pytest.raises(InvalidRequest, match="no version becomes durable here"):
            await ingest.roll_back(RollBack(to=0, wait="durable"))
        with pytest.raises(InvalidRequest, match="no version becomes durable here"):
            await ingest.push_folder(model, DURABLE)
        status = await ingest.commit(1, CommitUpload())
        assert not status.durable and (await ingest.state()).durable is None


async def killed_before_it_is_durable(model: Path, memory: WeightLog, disk: WeightLog) -> int:
    """Commit versions in an ingest process, and kill it when one is served and its copy has begun; returns that one."""
    command = [sys.executable, "-m", "tests.unit.store.committer", model, memory.root, disk.root]
    process = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None

    def is_being_copied(version: int) -> bool:
        head, behind = memory.head(), disk.head()
        newest = -1 if behind is None else behind.version
        return head is not None and head.version == version > newest >= 0 and disk.staging(version).is_dir()

    try:
        for version in range(1, 20):
            process.stdin.write(f"{version}\n".encode())
            assert await process.stdout.readline() == b"staged\n"
            process.stdin.write(b"commit\n")
            await process.stdin.drain()
            if await asyncio.to_thread(stop_at, psutil.Process(process.pid), lambda: is_being_copied(version), 3.0):  # noqa: B023
                return version
            assert await process.stdout.readline() == b"committed\n"
        raise AssertionError("no copy was ever seen in the moment")
    finally:
        process.kill()
        await process.wait()
