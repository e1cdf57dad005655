"""Numbers do not say which weights they name: what the ingest makes of replicas and logs that differ from its own."""

import shutil
import uuid

import pytest

from rollout_service.errors import LogCorrupt
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.fleet import ReplicaStatus
from rollout_service.protocol.upload import CommitUpload
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, begin_of, changed, config_of, replica, started


async def serving(ingest: Ingest, version: int, sequence: int = 0, **fields: object) -> ReplicaStatus:
    """A replica that serves what the ingest has under that number, but for ``fields``."""
    known: dict[str, object] = {"digest": (await ingest.status(version)).digest, "log": await log_of(ingest)}
    return replica("a", version, sequence).model_copy(update={**known, **fields})


async def log_of(ingest: Ingest) -> str:
    return (await ingest.newest()).origin.log


class TestDigest:
    async def test_a_version_is_live_by_the_digest_and_not_by_the_number(self, ingest, trainer, weights):
        await trainer.push(1, weights)
        await ingest.report(await serving(ingest, 1, digest="00ff"))
        assert {(await ingest.status(version)).state for version in (0, 1)} == {"committed"}
        head = WeightLog(ingest._log.root).head()
        assert head is not None
        await ingest.report(await serving(ingest, 1, sequence=1, digest=head.digest))
        assert {(await ingest.status(version)).state for version in (0, 1)} == {"live"}
        await trainer.push(2, weights)
        await ingest.report(await serving(ingest, 2, sequence=2))
        assert {(await ingest.status(version)).state for version in (1, 2)} == {"live"}

    async def test_a_replica_at_an_unknown_version_makes_nothing_live(self, ingest, trainer, weights):
        await trainer.push(1, weights)
        await ingest.report(await serving(ingest, 1))
        report = await serving(ingest, 1, sequence=1)
        await ingest.report(report.model_copy(update={"version": 7, "digest": "00ff"}))
        assert {(await ingest.status(version)).state for version in (0, 1)} == {"committed"}


class TestRestoredLog:
    async def test_after_a_log_restore_replicas_are_told_of_the_new_digest(
        self, config, ingest, trainer, weights, log, tmp_path
    ):
        shutil.copytree(log.root, tmp_path / "backup")
        await trainer.push(1, weights)
        old = await serving(ingest, 1)
        seen = await ingest.sync(old, None)
        await ingest.stop()
        shutil.rmtree(log.root)
        (tmp_path / "backup").rename(log.root)
        again = Ingest(config)
        await again.start()
        await Trainer(again).push(1, changed(weights, 0.25))
        await again.report(old.model_copy(update={"sequence": 1}))
        assert (await again.status(1)).state == "committed"
        desired = await again.sync(old.model_copy(update={"sequence": 2}), seen)  # at once: what it has seen is another
        assert (desired.version, desired.digest) == (
            1,
            (await again.status(1)).digest,
        ) and desired.digest != seen.digest
        await again.report(await serving(again, 1, sequence=3))
        assert (await again.status(1)).state == "live"
        await again.stop()

    async def test_a_log_replaced_under_a_running_ingest_is_not_written(self, ingest, trainer, weights, log, tmp_path):
        shutil.copytree(log.root, tmp_path / "backup")
        await trainer.upload(1, weights)
        before = log.root / "ORIGIN"
        before.write_text(before.read_text().replace((await ingest.newest()).origin.writer, uuid.uuid4().hex))
        with pytest.raises(LogCorrupt, match=r"was replaced while this ingest wrote it .*: restart the service"):
            await ingest.commit(1, CommitUpload())
        with pytest.raises(LogCorrupt, match="was replaced"):
            await ingest.begin(begin_of(2, weights))
        assert log.versions() == [0]


class TestOtherLog:
    async def test_nothing_is_committed_while_replicas_follow_another_log(
        self, ingest, trainer, weights, model, tmp_path
    ):
        await trainer.push(7, weights)
        old = await serving(ingest, 7)
        async with started(config_of(model, tmp_path / "empty")) as elsewhere:
            await elsewhere.report(old.model_copy(update={"sequence": 1}))
            assert (await elsewhere.status(0)).state == "committed"  # 7 is more than 0, and of another log
            for refused in (elsewhere.begin(begin_of(1, weights)), elsewhere.commit(0, CommitUpload())):
                with pytest.raises(
                    LogCorrupt, match=r"but a follow another one .*at version 7.*bring the ingest back"
                ) as why:
                    await refused
                assert why.value.detail["log"] == await log_of(elsewhere) != old.log
            await elsewhere.goodbye("a")
            assert (await Trainer(elsewhere).push(1, weights)).state == "committed"
