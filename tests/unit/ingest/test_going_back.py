"""A trainer whose count goes back: versions that the ingest numbers, labels, and rollbacks."""

import os
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.errors import NotFound, QuantizationError, VersionConflict
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import UPLOADER_HEADER, Announcement, CommitUpload, RollBack
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, Weights, begin_of, changed, config_of, parts_of, replica, started


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log", weights={"keep_versions": 4}).resolved()


def announced(weights: Weights, label: str | None = None, uploader: str = "one") -> Announcement:
    return Announcement(version="next", tensors=begin_of(0, weights).tensors, label=label, uploader=uploader)


async def push(
    ingest: Ingest, trainer: Trainer, weights: Weights, label: str | None = None, uploader: str = "one"
) -> WeightStatus:
    """A whole push of the next version."""
    plan = await ingest.begin(announced(weights, label, uploader))
    await trainer.send(plan, parts_of(weights), **{UPLOADER_HEADER: uploader})
    return await ingest.commit(plan.version, CommitUpload())


class TestNext:
    async def test_each_push_has_the_number_after_the_newest(self, ingest, trainer, weights):
        await trainer.push(7, weights)
        first = await push(ingest, trainer, changed(weights, 1.0), "run/step-3")
        second = await push(ingest, trainer, changed(weights, 2.0), "run/step-4")
        assert [(s.version, s.label) for s in (first, second)] == [(8, "run/step-3"), (9, "run/step-4")]
        assert [s.label for s in await ingest.versions()] == [None, None, "run/step-3", "run/step-4"]
        assert (await ingest.fleet()).latest_label == "run/step-4"
        assert await ingest.version_of("run/step-3") == 8
        assert (await push(ingest, trainer, weights, "run/step-3", "restarted")).version == 10
        assert await ingest.version_of("run/step-3") == 10

    async def test_a_begin_that_is_repeated_has_the_same_number(self, ingest, weights, restarted):
        first = await ingest.begin(announced(weights))
        assert await ingest.begin(announced(weights)) == first
        again = await restarted()
        assert (await again.begin(announced(weights))).version == first.version == 1
        assert (await again.begin(announced(weights, uploader="another"))).version == 2

    async def test_a_number_that_is_being_uploaded_is_passed_over(self, ingest, trainer, weights):
        await trainer.upload(5, weights, order=[0])
        assert (await ingest.begin(announced(weights))).version == 6

    async def test_what_nobody_goes_on_with_is_dropped_by_the_next(self, ingest, trainer, weights):
        abandoned = await ingest.begin(announced(weights, uploader="gone"))
        status = await push(ingest, trainer, weights)
        assert (abandoned.version, status.version) == (1, 2)
        with pytest.raises(
            VersionConflict, match=r"1 is not newer .*: version 2 is committed.*'next', and await each push before"
        ):
            await ingest.commit(1, CommitUpload())
        with pytest.raises(NotFound, match="push it again as version 'next'"):
            ingest.staged(1)

    async def test_a_label_goes_on_with_what_a_trainer_left(self, ingest, trainer, weights):
        first = await ingest.begin(announced(weights, "run/step-3"))
        await trainer.send(first, parts_of(weights), [0, 1], **{UPLOADER_HEADER: "one"})
        second = await ingest.begin(announced(weights, "run/step-3", "restarted"))
        assert second.version == first.version and set(second.digests) == {0, 1}
        await trainer.send(second, parts_of(weights), **{UPLOADER_HEADER: "restarted"})
        assert (await ingest.commit(first.version, CommitUpload())).label == "run/step-3"

    async def test_a_version_that_failed_leaves_its_number(self, ingest, trainer, weights):
        broken = changed(weights, 0.0)
        next(iter(broken.values()))[0, 0] = float("nan")
        with pytest.raises(QuantizationError):
            await push(ingest, trainer, broken, "run/step-3")
        assert (await push(ingest, trainer, weights, "run/step-3", "restarted")).version == 1

    async def test_another_label_under_a_committed_number_conflicts(self, ingest, trainer, weights):
        begin = begin_of(4, weights).model_copy(update={"label": "a"})
        for announced in (begin, begin_of(4, weights), begin.model_copy(update={"label": "b"})):
            plan = await ingest.begin(announced)
        await trainer.send(plan, parts_of(weights), **{UPLOADER_HEADER: ""})
        assert (await ingest.commit(4, CommitUpload())).label == "b"
        with pytest.raises(VersionConflict, match="committed with the label 'b', and the label 'a' now"):
            await ingest.begin(begin)

    async def test_a_number_that_is_not_newer_says_the_ways_out(self, ingest, trainer, weights):
        await trainer.push(5, weights)
        newest = await push(ingest, trainer, weights, "run/step-6")
        with pytest.raises(
            VersionConflict, match=r"'next'.*'run/step-3'.*rollback.*of 0, 5, 6 \(run/step-6\)"
        ) as refused:
            await ingest.begin(begin_of(3, weights))
        latest = {"latest_version": 6, "latest_digest": newest.digest, "kept_versions": [0, 5, 6]}
        assert refused.value.detail == {"version": 3, **latest}


class TestRollback:
    async def test_an_older_version_becomes_the_newest(self, ingest, trainer, weights, log):
        pushed = [await push(ingest, trainer, changed(weights, step), f"run/step-{step}") for step in (1, 2, 3)]
        status = await ingest.roll_back(RollBack(to=1))
        assert (status.version, status.label, status.rollback_of) == (4, "run/step-1", 1)
        assert status.digest == pushed[0].digest and (await ingest.fleet()).latest_version == 4
        manifest = log.manifest(4)
        assert all(os.path.samefile(log.folder(1) / file, log.folder(4) / file) for file in manifest.files())
        log.verify(manifest)
        after = await push(ingest, trainer, changed(weights, 5.0), "run/step-2")
        assert after.version == 5 and await ingest.version_of("run/step-2") == 5

    async def test_the_same_rollback_again_changes_nothing(self, ingest, trainer, weights):
        for step in (1, 2):
            await push(ingest, trainer, changed(weights, step), f"run/step-{step}")
        first = await ingest.roll_back(RollBack(to="run/step-1"))
        assert await ingest.roll_back(RollBack(to="run/step-1")) == first
        assert await ingest.roll_back(RollBack(to=1)) == first
        assert (await ingest.roll_back(RollBack(to=2))).version == 4

    async def test_the_files_stay_when_the_older_version_goes(self, model, tmp_path, weights):
        async with started(config_of(model, tmp_path / "log", weights={"keep_versions": 2}).resolved()) as ingest:
            trainer, log = Trainer(ingest), WeightLog(tmp_path / "log")
            await push(ingest, trainer, changed(weights, 1.0))
            back = await ingest.roll_back(RollBack(to=0))
            assert log.versions() == [1, 2]
            assert await ingest.roll_back(RollBack(to=0)) == back  # the answer was lost, and 0 is gone
            await push(ingest, trainer, changed(weights, 2.0))
            assert log.versions() == [2, 3]
            log.verify(log.manifest(2))
            with pytest.raises(NotFound, match=r"version 1 cannot .* not in the log any more: kept are 2, 3"):
                await ingest.roll_back(RollBack(to=1))

    async def test_a_version_that_replicas_serve_is_waited_for(self, ingest, trainer, weights):
        status = await push(ingest, trainer, changed(weights, 1.0))
        await ingest.report(replica("a", 1, digest=status.digest))
        back = await ingest.roll_back(RollBack(to=0))
        assert back.state == "committed"
        await ingest.report(replica("a", back.version, 1, digest=back.digest))
        assert (await ingest.roll_back(RollBack(to=0, wait="all", timeout_s=5.0))).state == "live"

    async def test_an_upload_keeps_its_number_unless_it_is_the_very_next(self, ingest, trainer, weights):
        await push(ingest, trainer, changed(weights, 1.0))
        await trainer.upload(2, weights, order=[0])
        await trainer.upload(9, weights)
        assert (await ingest.roll_back(RollBack(to=0))).version == 3
        with pytest.raises(NotFound, match="version 3 is committed"):
            ingest.staged(2)
        assert (await ingest.commit(9, CommitUpload())).version == 9

    async def test_a_restarted_ingest_knows_labels_and_rollbacks(self, ingest, trainer, weights, restarted):
        for step in (1, 2):
            await push(ingest, trainer, changed(weights, step), f"run/step-{step}")
        back = await ingest.roll_back(RollBack(to="run/step-1"))
        again = await restarted()
        assert await again.status(back.version) == back
        assert await again.version_of("run/step-1") == back.version
        assert (await again.begin(begin_of(back.version, changed(weights, 1)))).state == "committed"
