"""What an ingest that died, or a caller that went away, leaves behind."""

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    LogCorrupt,
    LogLocked,
    LogUnreadable,
    NotFound,
    NotReady,
    RolloutServiceError,
    UploadIncomplete,
)
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.base import Failure
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource
from rollout_service.protocol.weight_log import Head
from rollout_service.store import durable_io
from rollout_service.store import log as log_module
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import MANIFEST_FILE
from rollout_service.store.upload_record import RECORD_FILE, STAGED_FILE
from tests.unit.ingest.faults import fail
from tests.unit.ingest.trainer import (
    Restart,
    Trainer,
    Weights,
    begin_of,
    changed,
    config_of,
    open_files,
    order,
    replica,
    settle,
    started,
)

LONG_S = 60.0


def of_commit(config: ServiceConfig, commit: str | None) -> ServiceConfig:
    """The configuration as a node has it that downloaded the model from the hub at that commit."""
    model = config.model.model_copy(update={"revision": commit, "served_name": "org/model"})
    return config.model_copy(update={"model": model})


class TestRestart:
    async def test_a_restart_continues_at_the_same_head(self, restarted, config, trainer, weights):
        pushed = await trainer.push(3, weights)
        manifest = config.weights.root / "0" / "manifest.json"
        written = manifest.stat().st_mtime_ns
        again = await restarted()
        assert (await again.fleet()).latest_version == 3
        assert await again.status(3) == pushed and manifest.stat().st_mtime_ns == written
        assert [status.version for status in await again.versions()] == [0, 3]
        assert (await Trainer(again).push(4, weights)).state == "committed"

    async def test_a_pause_outlives_a_restart(self, restarted, config, ingest):
        ordered = await order(ingest, True, "abort")
        again = await restarted()
        assert (await again.fleet()).paused
        desired = await again.sync(replica("a", 0), None)
        assert (desired.paused, desired.pause_mode, desired.order) == (True, "abort", ordered)

    async def test_a_log_of_another_commit_is_refused(self, restarted, model, tmp_path):
        old, new = "a" * 40, "b" * 40
        config = config_of(model, tmp_path / "of-the-hub")
        await restarted(of_commit(config, old))
        with pytest.raises(LogCorrupt) as refused:
            await restarted(of_commit(config, new))
        assert str(refused.value) == (
            f"the log at {tmp_path / 'of-the-hub'} was begun with commit {old}, and org/model is at {new} now: "
            f"set model.revision: {old}, or name another weights.root"
        )
        assert (await (await restarted(of_commit(config, old))).fleet()).latest_version == 0

    async def test_a_folder_s_log_is_not_a_repository_s(self, restarted, model, tmp_path):
        commit, config = "a" * 40, config_of(model, tmp_path / "of-a-folder")
        await restarted(config)
        with pytest.raises(
            LogCorrupt, match=rf"with a folder and not with org/model at commit {commit}: set model\.path"
        ):
            await restarted(of_commit(config, commit))
        other = config_of(model, tmp_path / "of-the-hub")
        await restarted(of_commit(other, commit))
        with pytest.raises(
            LogCorrupt, match=rf"with commit {commit} of a hub's repository: set model\.path to that one"
        ):
            await restarted(other)

    async def test_a_log_of_another_model_or_quantization_is_refused(self, restarted, ingest, config, tied_model):
        quants = [{"weights": "none"}, {"skip": ["*.down_proj"]}, {"scales": "power_of_two"}]
        others = [config_of(config.model.path, config.weights.root, quant=quant) for quant in quants]
        for other in (config_of(tied_model, config.weights.root), *others):
            with pytest.raises(
                LogCorrupt, match=r"version 0 of another model or quantization .*name another weights\.root"
            ):
                await restarted(other)

    async def test_a_log_whose_latest_is_gone_is_not_begun_anew(self, restarted, config, trainer, weights, log):
        await trainer.push(1, weights)
        (log.root / "LATEST").unlink()
        with pytest.raises(LogCorrupt, match=r"holds the versions \[0, 1\] but no LATEST"):
            await restarted()
        assert log.folder(1).exists()


class TestEnd:
    async def test_a_stopping_ingest_finishes_its_commit_and_then_unlocks(
        self, config, ingest, trainer, weights, monkeypatch
    ):
        await trainer.upload(1, weights)
        await trainer.upload(2, weights)
        committing, going, commit = threading.Event(), threading.Event(), WeightLog.commit

        def slow(*args: Any) -> Head:
            committing.set()
            assert going.wait(LONG_S)
            return commit(*args)

        monkeypatch.setattr(WeightLog, "commit", slow)
        half = asyncio.create_task(ingest.commit(1, CommitUpload()))
        assert await asyncio.to_thread(committing.wait, LONG_S)
        waiting = asyncio.create_task(ingest.commit(2, CommitUpload()))
        await settle()
        ending, successor = asyncio.create_task(ingest.stop()), Ingest(config)
        with pytest.raises(LogLocked):
            await successor.start()
        going.set()
        assert (await half).version == 1
        with pytest.raises(NotReady, match="send it again"):
            await waiting
        await ending
        async with started(config) as successor:
            assert (await successor.fleet()).latest_version == 1
            assert (await successor.commit(2, CommitUpload())).state == "committed"

    async def test_callers_of_a_stopping_ingest_are_told_to_retry(self, ingest, trainer, weights):
        desired = await ingest.sync(replica("a", 0), None)
        status = await trainer.push(1, weights)
        pausing = asyncio.create_task(ingest.set_paused(True, "keep", LONG_S))
        while not (desired := await ingest.sync(replica("a", 0, sequence=1), desired)).paused:
            pass
        syncing = asyncio.create_task(ingest.sync(replica("a", 0, sequence=2), desired))
        waiting = [pausing, syncing, asyncio.create_task(ingest.wait_live(status.version, LONG_S))]
        await settle()
        await ingest.stop()
        late = [ingest.commit(2, CommitUpload()), ingest.begin(begin_of(2, weights)), ingest.discard(2)]
        for answer in await asyncio.wait_for(asyncio.gather(*waiting, *late, return_exceptions=True), LONG_S):
            assert isinstance(answer, NotReady), answer


class TestCallersThatGoAway:
    @pytest.mark.parametrize("turns", [1, 3, 8])
    async def test_a_commit_is_finished_after_its_caller_disconnects(self, ingest, trainer, weights, turns, log):
        await trainer.upload(1, weights)
        commit = asyncio.create_task(ingest.commit(1, CommitUpload()))
        for _ in range(turns):
            await asyncio.sleep(0)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        status = await ingest.commit(1, CommitUpload())
        assert status.state == "committed" and (await ingest.fleet()).latest_version == 1
        log.verify(log.manifest(1))

    async def test_a_begin_whose_caller_disconnects_leaves_one_upload(self, ingest, trainer, weights):
        before = open_files()
        begin = asyncio.create_task(ingest.begin(begin_of(1, weights)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        begin.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begin
        assert (await trainer.push(1, weights)).state == "committed"
        assert open_files() == before

    async def test_a_cancelled_long_poll_does_not_disturb_the_others(self, ingest):
        desired = await ingest.sync(replica("a", 0), None)
        given_up = asyncio.create_task(ingest.sync(replica("a", 0, sequence=1), desired))
        kept = asyncio.create_task(ingest.sync(replica("b", 0), desired))
        await settle()
        given_up.cancel()
        await settle()
        pause = asyncio.create_task(ingest.set_paused(True, "keep", LONG_S))
        desired = await asyncio.wait_for(kept, LONG_S)
        assert desired.paused
        for name in "ab":
            await ingest.report(replica(name, 0, sequence=9, paused=True, obeyed=desired.order))
        await pause


@pytest.fixture
async def unreadable(restarted: Restart, ingest: Ingest, trainer: Trainer, weights: Weights, log: WeightLog) -> Path:
    """The staged file of version 1, beside version 2, that no process can open."""
    for version in (1, 2):
        await trainer.upload(version, weights, order=[0, 1, 2])
    await ingest.stop()
    staged = log.root / "staging" / "1.parts" / STAGED_FILE
    staged.unlink()
    staged.symlink_to(staged.name)
    return staged


class TestDiskThatFails:
    @pytest.mark.parametrize(
        ("number", "todo"), [(errno.EACCES, "make that folder writable for the service"), (errno.EIO, "check its disk")]
    )
    async def test_a_folder_that_cannot_be_locked_is_named(self, ingest, config, log, monkeypatch, number, todo):
        await ingest.stop()
        fail(monkeypatch, durable_io.WriterLock, "_open", number)
        why = rf"the log at {log.root} cannot be used: .*; {todo}, or name another weights\.root"
        with pytest.raises(RolloutServiceError, match=why):
            async with started(config):
                pass

    async def test_a_commit_that_fails_on_disk_stays_staged_for_a_retry(self, ingest, trainer, weights, log):
        await trainer.upload(1, weights)
        (log.root / ".LATEST.tmp").mkdir()
        with pytest.raises(RolloutServiceError, match=r"version 1 was not committed: .*commit it again"):
            await ingest.commit(1, CommitUpload())
        assert (await ingest.fleet()).latest_version == 0 and log.versions() == [0]
        assert (await ingest.status(1)).state == "staged" and not log.folder(1).exists()
        (log.root / ".LATEST.tmp").rmdir()
        assert (await ingest.commit(1, CommitUpload())).state == "committed"
        log.verify(log.manifest(1))

    async def test_a_commit_whose_last_fsync_fails_stands_with_a_warning(
        self, ingest, trainer, weights, log, restarted, monkeypatch
    ):
        await trainer.upload(1, weights)
        synced = 0

        def is_second_of_root(folder: Path) -> bool:
            nonlocal synced
            synced += folder == log.root
            return folder == log.root and synced == 2  # LATEST is replaced already

        with monkeypatch.context() as patch:
            for module in (durable_io, log_module):
                fail(patch, module, "sync_folder", errno.EIO, is_second_of_root)
            status = await ingest.commit(1, CommitUpload())
        assert status.state == "committed" and status.error is not None
        assert "the disk did not confirm it ([Errno 5]" in status.error.message
        assert log.versions() == [0, 1] and (await ingest.fleet()).latest_version == 1
        assert (await ingest.sync(replica("a", 0), None)).version == 1
        repeated = await ingest.commit(1, CommitUpload())
        assert repeated.error == status.error and repeated.digest == status.digest
        again = await restarted()
        assert (await again.fleet()).latest_version == 1 and (await again.status(1)).state == "committed"
        log.verify(log.manifest(1))
        assert (await Trainer(again).push(2, weights)).error is None

    async def test_failing_to_remove_an_old_version_does_not_fail_a_commit(
        self, ingest, trainer, weights, log, monkeypatch
    ):
        await ingest.report(replica("a", 0))
        for version in (1, 2):
            await trainer.push(version, weights)
            await ingest.report(replica("a", version, sequence=version))
        with monkeypatch.context() as patch:
            fail(patch, WeightLog, "drop", errno.EBUSY)
            assert (await trainer.push(3, weights)).state == "committed"
        assert log.versions() == [1, 2, 3]
        await trainer.push(4, weights)
        assert log.versions() == [2, 3, 4]

    async def test_failing_to_remove_the_parts_does_not_fail_a_commit(
        self, ingest, trainer, weights, log, monkeypatch, caplog
    ):
        await trainer.upload(1, weights)
        before = open_files()
        with monkeypatch.context() as patch:
            fail(patch, Path, "unlink", errno.ESTALE, lambda path, *_: path.name == STAGED_FILE)
            assert (await ingest.commit(1, CommitUpload())).state == "committed"
        assert f"{STAGED_FILE} cannot be removed yet" in caplog.text and open_files() < before
        assert (await trainer.push(2, weights)).state == "committed"

    async def test_versions_that_come_and_go_leave_no_file_open(self, ingest, trainer, weights):
        await trainer.push(1, weights)
        before = open_files()
        broken = changed(weights, float("inf"))
        for version in (2, 3):
            await trainer.push(version, weights)
            await trainer.upload(version + 10, broken)
            with pytest.raises(RolloutServiceError):
                await ingest.commit(version + 10, CommitUpload())
            await ingest.discard(version + 10)
            await trainer.upload(version + 20, weights, order=[0])
            with pytest.raises(UploadIncomplete):
                await ingest.commit(version + 20, CommitUpload())
        await trainer.push(30, weights)
        assert open_files() == before


class TestUnreadableVersion:
    @pytest.mark.parametrize(("is_folder", "error"), [(False, LogCorrupt), (True, LogUnreadable)])
    async def test_the_status_of_an_unreadable_version_says_what_to_do(
        self, restarted, trainer, weights, log, is_folder, error
    ):
        await trainer.push(1, weights)
        manifest = log.folder(0) / MANIFEST_FILE
        manifest.unlink()
        if is_folder:
            manifest.mkdir()
        again = await restarted()
        with pytest.raises(
            RolloutServiceError, match=r"^version 0 cannot be read: .*; check the disk of the log$"
        ) as why:
            await again.status(0)
        assert type(why.value) is error and why.value.detail == {"version": 0}
        old = (await again.versions())[0]
        assert (old.state, old.digest) == ("committed", None)
        assert old.error == Failure(type=error.__name__, message=why.value.message)
        assert [status.version for status in (await again.state()).versions] == [0, 1]
        assert (await again.status(1)).error is None

    async def test_a_version_whose_record_cannot_be_read_is_listed_without_it(
        self, restarted, trainer, weights, log, caplog
    ):
        pushed = await trainer.push(1, weights)
        record = log.folder(1) / RECORD_FILE
        record.unlink()
        record.mkdir()
        again = await restarted()
        shown = pushed.model_copy(update={"uploaded_bytes": None, "timings": None})
        assert (await again.versions())[1] == (await again.state()).versions[1] == shown
        assert caplog.text.count("how version 1 came is not shown") == 1


class TestUnreadableParts:
    @pytest.mark.parametrize("name", [STAGED_FILE, "upload.json", ""], ids=["its file", "its record", "its folder"])
    async def test_an_upload_that_cannot_be_read_is_dropped(self, unreadable, restarted, weights, name):
        path = unreadable.parent / name
        if path == unreadable.parent:
            shutil.rmtree(path)
        else:
            path.unlink()
        path.symlink_to(path.name)
        again = await restarted()
        assert [status.version for status in await again.versions()] == [0, 2]
        with pytest.raises(NotFound, match="cannot be taken up again"):
            await again.status(1)
        assert (await Trainer(again).push(1, weights)).state == "committed"

    async def test_a_source_that_cannot_be_read_any_more_is_dropped(self, model, tmp_path, weights, monkeypatch):
        source = tmp_path / "source"
        source.mkdir()
        save_file(dict(weights), source / "model.safetensors")
        config = config_of(model, tmp_path / "log", weights={"source_roots": [source.resolve()]})
        async with started(config) as first:
            await first.begin(BeginUpload(version=1, source=PathSource(path=source)))
        again = Ingest(config)
        with monkeypatch.context() as patch:
            fail(patch, Path, "stat", errno.ESTALE, lambda path: path.parent == source)
            await again.start()
        with pytest.raises(NotFound, match=r"neither committed nor staged any more: .*Stale file handle"):
            await again.status(1)
        await again.stop()
