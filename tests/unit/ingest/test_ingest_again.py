"""The same version once more: resumed, repeated, contested by another trainer, and found again after a restart."""

import asyncio
import fcntl
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rollout_service.client import RolloutClient
from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    InsufficientStorage,
    LogLocked,
    NotFound,
    QuantizationError,
    UploadIncomplete,
    VersionConflict,
)
from rollout_service.ingest import upload_session, uploads
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource, upload_digest
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.upload_record import JOURNAL, RECORD_FILE, STAGED_FILE, read_record
from tests.unit.client.real_ingest import real_ingest
from tests.unit.ingest.trainer import (
    PART_BYTES,
    Trainer,
    Weights,
    begin_of,
    changed,
    config_of,
    parts_of,
    replica,
    started,
)


async def race(url: str, pushes: list[Weights]) -> list[WeightStatus | BaseException]:
    async def push(weights: Weights) -> WeightStatus:
        async with RolloutClient(url) as client:
            return await client.push_weights(1, dict(weights), wait="none", parallel_parts=2)

    return await asyncio.gather(*map(push, pushes), return_exceptions=True)


class TestCommittedVersion:
    async def test_beginning_a_committed_version_again_needs_no_parts(self, ingest, trainer, weights):
        committed = await trainer.push(1, weights)
        plan = await ingest.begin(begin_of(1, weights))
        assert (plan.state, plan.missing_parts, plan.num_parts) == ("committed", (), len(parts_of(weights)))
        record = read_record(WeightLog(ingest._log.root).folder(1))
        assert record is not None and plan.digests == dict(enumerate(record.part_digests))
        meant = upload_digest(record.part_digests)
        assert await ingest.commit(1, CommitUpload(upload_digest=meant)) == committed
        with pytest.raises(VersionConflict, match="push a newer version") as refused:
            await ingest.commit(1, CommitUpload(upload_digest="0" * 32))
        assert refused.value.detail["digests"] == [meant, "0" * 32]

    async def test_a_late_part_of_a_committed_version_must_be_the_same(self, trainer, weights):
        await trainer.push(1, weights)
        first = parts_of(weights)[0]
        assert (await trainer.put(1, 0, first)).status_code == 200
        other = await trainer.put(1, 0, bytes(len(first)))
        assert other.status_code == 409 and len(set(other.json()["error"]["detail"]["digests"])) == 2
        assert (await trainer.put(1, 0, first[:-1])).status_code == 422

    async def test_another_table_for_a_committed_version_conflicts(self, ingest, trainer, weights):
        await trainer.push(1, weights)
        with pytest.raises(VersionConflict, match="committed with another tensor table") as refused:
            await ingest.begin(begin_of(1, {name: tensor.float() for name, tensor in weights.items()}))
        assert len(set(refused.value.detail["digests"])) == 2 and refused.value.detail["latest_version"] == 1

    async def test_beginning_a_path_again_conflicts_once_its_files_change(self, model, tmp_path, weights):
        source = tmp_path / "sources"
        source.mkdir()
        save_file(dict(weights), source / "model.safetensors")
        async with started(config_of(model, tmp_path / "log", weights={"source_roots": [source]}).resolved()) as ingest:
            begin = BeginUpload(version=1, source=PathSource(path=source))
            assert (await ingest.begin(begin)).state == "staged"
            assert (await ingest.begin(begin)).state == "staged"
            await ingest.commit(1, CommitUpload())
            assert (await ingest.begin(begin)).state == "committed"
            save_file(changed(weights, 1.0), source / "model.safetensors")
            with pytest.raises(VersionConflict, match="committed with another content under that path"):
                await ingest.begin(begin)


class TestTwoTrainers:
    async def test_of_two_trainers_one_wins_and_the_other_gets_a_conflict(self, model, tmp_path, weights):
        async with real_ingest(model, tmp_path / "log") as service:
            other = changed(weights, 1.0)
            results = await race(service.url, [weights, other])
            won = [r for r in results if isinstance(r, WeightStatus)]
            lost = [r for r in results if isinstance(r, VersionConflict | UploadIncomplete)]
            assert (len(won), len(lost)) == (1, 1), results
            winner = [weights, other][results.index(won[0])]
            async with RolloutClient(service.url) as client:
                assert await client.push_weights(1, dict(winner), wait="none") == won[0]

    async def test_the_last_announcement_of_a_version_wins(self, ingest, trainer, weights):
        first, other = {"X-Uploader": "first"}, changed(weights, 1.0)
        plan = await ingest.begin(begin_of(1, other).model_copy(update={"uploader": "first"}))
        await trainer.send(plan, parts_of(other), plan.missing_parts[:-1], **first)
        plan = await ingest.begin(begin_of(1, weights).model_copy(update={"uploader": "second"}))
        assert plan.missing_parts == (len(parts_of(weights)) - 1,)
        late = await trainer.put(1, plan.missing_parts[0], parts_of(other)[-1], **first)
        assert late.status_code == 409 and "a push that was announced later" in late.text
        await trainer.send(plan, parts_of(weights), range(plan.num_parts), **{"X-Uploader": "second"})
        both = [upload_digest(ingest.staged(1).parts.digests[i] for i in range(len(parts_of(weights)))), "0" * 32]
        with pytest.raises(VersionConflict, match="was announced again since") as refused:
            await ingest.commit(1, CommitUpload(upload_digest="0" * 32))
        assert refused.value.detail["digests"] == both
        committed = await ingest.commit(1, CommitUpload(upload_digest=both[0]))
        assert committed.digest == (await trainer.push(2, weights)).digest

    async def test_unquantizable_parts_can_be_replaced(self, ingest, trainer, weights):
        plan = await ingest.begin(begin_of(1, weights))
        broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()}
        await trainer.send(plan, parts_of(broken))
        await trainer.send(plan, parts_of(weights), plan.missing_parts[:-1])
        with pytest.raises(QuantizationError, match="is nan"):
            await ingest.commit(1, CommitUpload())
        await ingest.discard(1)
        await ingest.begin(begin_of(1, weights))
        await trainer.send(plan, parts_of(broken), range(5))
        await trainer.send(plan, parts_of(weights))
        assert (await ingest.commit(1, CommitUpload())).digest == (await trainer.push(2, weights)).digest
        assert (await ingest.status(1)).error is None


class Clocks:
    """The process's own clock and the one on the wall, for what the uploads ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own_s, self.wall_s = time.monotonic(), time.time()
        clock = SimpleNamespace(monotonic=lambda: self.own_s, time=lambda: self.wall_s)
        for module in (uploads, upload_session):
            monkeypatch.setattr(module, "time", clock)

    def go_on(self, seconds: float) -> None:
        self.own_s, self.wall_s = self.own_s + seconds, self.wall_s + seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


TTL_S = 1000.0


@pytest.fixture
def expiring(model: Path, tmp_path: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log", weights={"staged_ttl_s": TTL_S})


async def staged_versions(ingest: Ingest) -> list[int]:
    """After those are dropped that nobody has touched."""
    await ingest._expire()
    return [status.version for status in await ingest.versions() if status.state == "staged"]


class TestRestart:
    async def test_an_upload_continues_after_a_restart_without_a_new_begin(self, config, weights, log):
        async with started(config) as before:
            plan = await Trainer(before).upload(1, weights, order=[0, 2, 5])
        async with started(config) as again:
            assert [status.version for status in await again.versions()] == [0, 1]
            assert set((await again.status(1)).missing_parts) == set(range(plan.num_parts)) - {0, 2, 5}
            await Trainer(again).send(plan, parts_of(weights), set(range(plan.num_parts)) - {0, 2, 5})
            status = await again.commit(1, CommitUpload())
            assert status.digest == (await Trainer(again).push(2, weights)).digest
            log.verify(log.manifest(1))

    async def test_what_a_crash_damaged_is_asked_for_again(self, config, weights, log):
        async with started(config) as before:
            await Trainer(before).upload(1, weights, order=[0, 1, 2, 3])
            folder = log.root / "staging" / "1.parts"
        staged, journal = folder / STAGED_FILE, folder / JOURNAL
        data = bytearray(staged.read_bytes())
        data[PART_BYTES] ^= 1
        staged.write_bytes(data)
        lines = [line for line in journal.read_text().splitlines() if not line.startswith("2 ")]
        journal.write_text("\n".join([*lines, f"9 {PART_BYTES} 0", "10000 1 0", "noise", "2 655"]))
        async with started(config) as again:
            assert sorted((await again.begin(begin_of(1, weights))).digests) == [0, 3]

    async def test_a_part_after_a_line_that_was_cut_is_kept(self, config, weights, log):
        async with started(config) as before:
            await Trainer(before).upload(1, weights, order=[0, 1])
        with (log.root / "staging" / "1.parts" / JOURNAL).open("a") as journal:
            journal.write("2 655")
        async with started(config) as again:
            assert sorted(again.staged(1).parts.digests) == [0, 1]
            assert (await Trainer(again).put(1, 3, parts_of(weights)[3])).status_code == 200
        async with started(config) as last:
            assert sorted(last.staged(1).parts.digests) == [0, 1, 3]

    async def test_a_staged_version_with_a_damaged_record_is_dropped(self, config, weights, log):
        async with started(config) as before:
            await Trainer(before).upload(1, weights, order=[0])
        path = log.root / "staging" / "1.parts" / RECORD_FILE
        path.write_text(path.read_text().replace('"version":1', '"version":2'))
        async with started(config) as again:
            with pytest.raises(NotFound):
                await again.status(1)
            assert list((log.root / "staging").iterdir()) == []

    async def test_what_was_overtaken_is_not_taken_up_again(self, config, weights, log):
        async with started(config) as before:
            await Trainer(before).upload(1, weights, order=[0])
        parts = log.root / "staging" / "1.parts"
        parts.rename(log.root / "kept")
        async with started(config) as again:
            await Trainer(again).push(2, weights)
        (log.root / "kept").rename(parts)
        async with started(config) as last:
            assert [status.version for status in await last.versions()] == [0, 2] and not parts.exists()

    async def test_a_commit_killed_before_it_wrote_latest_is_staged_again(self, config, weights, log):
        async with started(config) as before:
            await Trainer(before).upload(1, weights)
        log.staging(1).rename(log.folder(1))
        async with started(config) as again:
            assert (await again.status(1)).state == "staged" and log.versions() == [0] and not log.folder(1).exists()
            assert (await again.commit(1, CommitUpload())).state == "committed"

    async def test_after_a_restart_nothing_is_live_until_all_have_reported(self, config, weights):
        async with started(config) as before:
            for name in "ab":
                await before.report(replica(name, 0))
            assert (await before.status(0)).state == "live"
        async with started(config) as again:
            await again.report(replica("a", 0))
            assert (await again.status(0)).state == "committed"
            for version in (1, 2, 3):
                await Trainer(again).push(version, weights)
            assert [status.version for status in await again.versions()] == [0, 1, 2, 3]
            await again.report(replica("b", 2))
            assert (await again.status(0)).state == "live"
            await Trainer(again).push(4, weights)
            assert [status.version for status in await again.versions()] == [0, 2, 3, 4]


class TestExpiry:
    async def test_an_idle_upload_expires_and_its_trainer_is_told_why(self, expiring, weights, clocks):
        async with started(expiring) as ingest:
            await Trainer(ingest).upload(1, weights, order=[0])
            clocks.go_on(0.9 * TTL_S)
            assert (await Trainer(ingest).put(1, 1, parts_of(weights)[1])).status_code == 200
            clocks.go_on(0.9 * TTL_S)
            assert await staged_versions(ingest) == [1]
            clocks.go_on(0.2 * TTL_S)
            assert await staged_versions(ingest) == []
            assert list((expiring.weights.root / "staging").iterdir()) == []
            late = await Trainer(ingest).put(1, 2, parts_of(weights)[2])
            assert late.status_code == 404 and "nothing came for 1100 s" in late.json()["error"]["message"]
            await ingest.begin(begin_of(1, weights))
            assert await staged_versions(ingest) == [1]

    @pytest.mark.parametrize("jump_s", [100 * TTL_S, -100 * TTL_S])
    async def test_a_wall_clock_that_is_set_drops_no_upload(self, expiring, weights, clocks, jump_s):
        async with started(expiring) as ingest:
            await Trainer(ingest).upload(1, weights, order=[0])
            clocks.wall_s += jump_s
            assert await staged_versions(ingest) == [1]
            clocks.go_on(1.1 * TTL_S)
            assert await staged_versions(ingest) == []

    async def test_downtime_counts_toward_expiry_but_leaves_time_to_resume(self, expiring, weights, clocks):
        for away_s, comes_back in ((0.9, False), (1.1, False), (100.0, True)):
            async with started(expiring) as before:
                await Trainer(before).upload(1, weights, order=[0])
            clocks.go_on(away_s * TTL_S)
            async with started(expiring) as again:
                assert await staged_versions(again) == [1]
                if comes_back:
                    assert (await Trainer(again).put(1, 1, parts_of(weights)[1])).status_code == 200
                clocks.go_on(0.3 * TTL_S)
                assert await staged_versions(again) == ([1] if comes_back else [])

    async def test_an_upload_dated_in_the_future_expires_like_any_other(self, expiring, weights, clocks):
        async with started(expiring) as before:
            await Trainer(before).upload(1, weights, order=[0])
        clocks.wall_s -= 100 * TTL_S
        async with started(expiring) as again:
            clocks.go_on(1.1 * TTL_S)
            assert await staged_versions(again) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path, leave_bytes: int) -> Path:
    filler = folder / "filler"
    free = shutil.disk_usage(folder).free - leave_bytes
    with filler.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, free)
    return filler


class TestOneWriter:
    async def test_a_second_ingest_is_refused_and_leaves_uploads_alone(self, config, ingest, trainer, weights):
        await trainer.upload(1, weights)
        with pytest.raises(LogLocked, match=r"is being written by process \d+ .*after 0\.2 s"):
            await Ingest(config).start()
        assert (await ingest.commit(1, CommitUpload())).state == "committed"

    async def test_a_second_ingest_waits_for_the_first_to_end(self, model, tmp_path, weights, monkeypatch):
        refused, flock = threading.Event(), fcntl.flock

        def noted(fd: int, operation: int) -> None:
            try:
                flock(fd, operation)
            except BlockingIOError:
                refused.set()
                raise

        monkeypatch.setattr(fcntl, "flock", noted)
        config = config_of(model, tmp_path / "log", weights={"lock_wait_s": 60})
        async with started(config) as first:
            await Trainer(first).upload(1, weights)
            second = Ingest(config)
            starting = asyncio.create_task(second.start())
            assert await asyncio.to_thread(refused.wait, 60)
            assert not starting.done()
        await starting
        assert (await second.commit(1, CommitUpload())).state == "committed"
        await second.stop()


class TestFullDisk:
    async def test_a_version_too_large_for_the_disk_is_refused_at_begin(self, model, small_disk, weights):
        async with started(config_of(model, small_disk / "log")) as ingest:
            nbytes = begin_of(1, weights).nbytes
            for leave_bytes in (100_000, nbytes):  # for neither the version, and for the version without its parts
                filler = fill(small_disk, leave_bytes)
                free = shutil.disk_usage(small_disk).free
                with pytest.raises(InsufficientStorage, match=r"version 1 .* needs \d+ bytes") as refused:
                    await ingest.begin(begin_of(1, weights))
                assert refused.value.detail["needed_bytes"] > free >= refused.value.detail["free_bytes"] - 8192
                assert [status.version for status in await ingest.versions()] == [0]
                assert list((small_disk / "log" / "staging").iterdir()) == []
                filler.unlink()
            assert (await Trainer(ingest).push(1, weights)).state == "committed"

    async def test_a_full_disk_during_an_upload_or_a_commit_loses_nothing(self, model, small_disk, weights):
        async with started(config_of(model, small_disk / "log")) as ingest:
            trainer, parts = Trainer(ingest), parts_of(weights)
            plan = await trainer.upload(1, weights, order=[0])
            filler = fill(small_disk, 4096)
            full = await trainer.put(1, 1, parts[1])
            assert full.status_code == 507
            assert full.json()["error"]["detail"]["needed_bytes"] == len(parts[1])
            filler.unlink()
            assert set((await ingest.status(1)).missing_parts) == set(range(1, len(parts)))
            await trainer.send(plan, parts, range(1, len(parts)))
            filler = fill(small_disk, 0)
            with pytest.raises(InsufficientStorage, match="manifest of version 1"):
                await ingest.commit(1, CommitUpload())
            assert (await ingest.status(1)).state == "staged" and (await ingest.fleet()).latest_version == 0
            filler.unlink()
            assert (await ingest.commit(1, CommitUpload())).state == "committed"
            WeightLog(small_disk / "log").verify(WeightLog(small_disk / "log").manifest(1))
