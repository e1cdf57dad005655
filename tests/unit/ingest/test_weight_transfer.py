"""Weights that a trainer broadcasts: a receiver process of its own, over gloo, into a real ingest.

One ingest and one group serve all of these tests, as they would a trainer.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from rollout_service.errors import (
    InvalidManifest,
    NotFound,
    QuantizationError,
    UploadIncomplete,
    VersionConflict,
    WeightTransferFailed,
)
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import CommitUpload
from tests.support.gloo_trainer import GlooTrainer, update_info
from tests.unit.ingest import expected
from tests.unit.ingest.broadcasting import AS_BEFORE, join, push, receive_nothing, send
from tests.unit.ingest.trainer import Trainer, changed, config_of, started

pytestmark = pytest.mark.asyncio(loop_scope="module")
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ingest(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ingest]:
    """Nobody serves: a commit waits for no replica."""
    config = config_of(model, tmp_path_factory.mktemp("broadcasts") / "log", scaling={"min_replicas": 0})
    async with started(config) as ingest:
        yield ingest


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def joined(ingest: Ingest) -> AsyncIterator[GlooTrainer]:
    """A trainer whose group the ingest's receiver has joined."""
    trainer = GlooTrainer()
    await join(ingest, trainer)
    yield trainer
    trainer.close()


@pytest_asyncio.fixture(loop_scope="module")
async def newest(ingest: Ingest, joined: GlooTrainer) -> int:
    """The newest committed version."""
    return (await ingest.fleet()).latest_version


class TestWholeUpdates:
    async def test_each_broadcast_becomes_the_version_of_an_upload(self, ingest, joined, newest, weights, fingerprint):
        for version in (newest + 1, newest + 2):
            sent = changed(weights, version / 8)
            status = await push(ingest, joined, sent)
            assert (status.version, status.state) == (version, "live")
            assert status.digest == expected.digest(sent, fingerprint)
        assert ingest.transfer.status().state == "joined"

    @pytest.mark.parametrize(
        ("label", "more"), [("{}", 5), (None, 1), ("0", 1), ("step-9", 1), ("9" * 16, 1), ("-3", 1), ("", 1)]
    )
    async def test_a_label_that_is_a_newer_integer_is_the_version(self, ingest, joined, newest, weights, label, more):
        version = newest + more
        status = await push(ingest, joined, weights, None if label is None else label.format(version))
        assert status.version == version == (await ingest.versions())[-1].version
        assert status.label == ("step-9" if label == "step-9" else None)


class TestEmptyTables:
    """vLLM 0.33's trainer sends its table once, and empty ones in the rounds that repeat it."""

    @pytest.mark.parametrize("empty", [AS_BEFORE, [AS_BEFORE], [{}]], ids=["vLLM", "a list", "no fields"])
    async def test_an_empty_table_repeats_the_round_before(self, ingest, joined, newest, weights, fingerprint, empty):
        await push(ingest, joined, weights)
        for version in (newest + 2, newest + 3):
            sent = changed(weights, version / 8)
            status = await push(ingest, joined, sent, announced=empty)
            assert (status.version, status.digest) == (version, expected.digest(sent, fingerprint))

    async def test_tensors_may_be_broadcast_one_by_one_and_so_again(self, ingest, joined, weights, fingerprint):
        # "packed" in update_info: where trainers for vLLM below 0.28 say it
        for announced in ({**update_info(weights), "packed": False}, AS_BEFORE):
            await ingest.transfer.start()
            receiving = asyncio.create_task(ingest.transfer.update(announced))
            await asyncio.to_thread(joined.broadcast, weights.items(), packed=False)
            await receiving
            assert (await ingest.transfer.finish(None)).digest == expected.digest(weights, fingerprint)

    async def test_a_changed_table_takes_the_place_of_the_first(self, ingest, joined, weights, fingerprint):
        await push(ingest, joined, weights)
        reordered = dict(reversed(weights.items()))
        for announced in (None, AS_BEFORE):
            status = await push(ingest, joined, reordered, announced=announced)
            assert status.digest == expected.digest(weights, fingerprint)

    async def test_requests_of_a_round_repeat_those_of_the_last(self, ingest, joined, weights, fingerprint):
        halves = dict([*weights.items()][:5]), dict([*weights.items()][5:])
        for announced in (None, AS_BEFORE):
            await ingest.transfer.start()
            for half in halves:
                await send(ingest, joined, half, announced)
            assert (await ingest.transfer.finish(None)).digest == expected.digest(weights, fingerprint)

    async def test_a_failed_round_leaves_the_table_as_it_was(self, ingest, joined, weights, fingerprint):
        """vLLM's trainer compares with the last round that it finished."""
        await push(ingest, joined, weights)
        await ingest.transfer.start()
        with pytest.raises(InvalidManifest, match=r"unknown: model\.extra\.weight"):
            await send(ingest, joined, {"model.extra.weight": torch.zeros(2), **weights})
        assert (await push(ingest, joined, weights, announced=AS_BEFORE)).digest == expected.digest(
            weights, fingerprint
        )

    async def test_an_empty_table_may_be_sent_again(self, ingest, joined, newest, weights):
        await push(ingest, joined, weights)
        await ingest.transfer.start()
        again = asyncio.create_task(ingest.transfer.update(AS_BEFORE))
        await send(ingest, joined, weights, AS_BEFORE)
        await again  # while the first was received
        await ingest.transfer.update(AS_BEFORE)  # and after it
        assert (await ingest.transfer.finish(None)).version == newest + 2


class TestRepeatedRequests:
    async def test_an_update_and_a_finish_may_come_again(self, ingest, joined, newest, weights, fingerprint):
        await ingest.transfer.start()
        await ingest.transfer.start()
        again = asyncio.create_task(ingest.transfer.update(update_info(weights)))
        await send(ingest, joined, weights)
        await again  # while the first was received
        await ingest.transfer.update(update_info(weights))  # and after it
        first, second = await asyncio.gather(ingest.transfer.finish(None), ingest.transfer.finish(None))
        assert first == second and first.version == newest + 1
        assert (await ingest.transfer.finish(None)).version == newest + 1
        assert first.digest == expected.digest(weights, fingerprint)

    async def test_a_caller_that_goes_away_changes_nothing(self, ingest, joined, newest, weights):
        await ingest.transfer.start()
        gone = await receive_nothing(ingest, weights)
        gone.cancel()
        await send(ingest, joined, weights)
        assert (await ingest.transfer.finish(None)).version == newest + 1

    async def test_an_incomplete_version_fails_by_name_each_time(self, ingest, joined, newest, weights):
        await ingest.transfer.start()
        await send(ingest, joined, {UP_PROJ: weights[UP_PROJ]})
        for _ in range(2):
            with pytest.raises(InvalidManifest, match=f"{len(weights) - 1} missing") as refused:
                await ingest.transfer.finish(None)
            assert len(refused.value.detail["missing"]) == len(weights) - 1
        assert [status.version for status in await ingest.versions()][-1] == newest
        assert (await push(ingest, joined, weights)).version == newest + 1


class TestWrongAnnouncements:
    @pytest.mark.parametrize(
        ("wrong", "problem"),
        [
            ({"model.extra.weight": torch.zeros(3, 5)}, "unknown: model.extra.weight"),
            ({UP_PROJ: torch.zeros(3, 5)}, rf"wrong_shape: {UP_PROJ} is \[3, 5\]"),
            (
                {"model.norm.weight": torch.zeros(256, dtype=torch.int64)},
                "'model.norm.weight' is int64; the ingest takes",
            ),
            ({"": torch.zeros(256)}, "'' is float32"),
        ],
        ids=["name", "shape", "dtype", "no name"],
    )
    async def test_a_wrong_tensor_is_received_and_then_refused(self, ingest, joined, newest, weights, wrong, problem):
        await ingest.transfer.start()
        with pytest.raises(InvalidManifest, match=problem):
            await send(ingest, joined, {**weights, **wrong})
        # the trainer may never come back: the number is free at once
        assert (await Trainer(ingest).push(newest + 1, weights)).version == newest + 1
        with pytest.raises(InvalidManifest, match=problem):
            await ingest.transfer.finish(None)
        assert (await push(ingest, joined, weights)).version == newest + 2  # the group is sound still

    async def test_a_tensor_that_comes_twice_is_refused(self, ingest, joined, weights):
        await ingest.transfer.start()
        await send(ingest, joined, weights)
        with pytest.raises(InvalidManifest, match=f"came twice in one update: {UP_PROJ}"):
            await send(ingest, joined, {UP_PROJ: weights[UP_PROJ]})

    async def test_a_nan_fails_the_version_by_name(self, ingest, joined, newest, weights):
        broken = {name: tensor.clone() for name, tensor in weights.items()}
        broken[UP_PROJ][3, 5] = float("nan")
        with pytest.raises(QuantizationError, match=rf"{UP_PROJ}\[3, 5\] is nan"):
            await push(ingest, joined, broken)
        assert (await push(ingest, joined, weights)).version == newest + 1

    async def test_an_update_without_a_start_is_received_and_refused(self, ingest, joined, newest, weights):
        await push(ingest, joined, weights)
        with pytest.raises(WeightTransferFailed, match="POST /start_weight_update first"):
            await send(ingest, joined, weights)
        assert (await push(ingest, joined, weights)).version == newest + 2


class TestOutOfOrder:
    async def test_while_tensors_come_nothing_else_begins(self, ingest, joined, newest, weights):
        await ingest.transfer.start()
        receiving = await receive_nothing(ingest, weights)
        for request, problem in (
            (ingest.transfer.start(), "are being received"),
            (ingest.transfer.finish(None), "still being received"),
            (ingest.transfer.update(update_info({UP_PROJ: weights[UP_PROJ]})), "another POST /update_weights"),
        ):
            with pytest.raises(WeightTransferFailed, match=problem):
                await request
        await asyncio.to_thread(joined.broadcast, weights.items())
        await receiving
        assert (await ingest.transfer.finish(None)).version == newest + 1

    @pytest.mark.parametrize("more", [1, 2])
    async def test_an_upload_that_was_committed_overtakes_a_broadcast(self, ingest, joined, newest, weights, more):
        await ingest.transfer.start()
        await send(ingest, joined, weights)
        assert (await Trainer(ingest).push(newest + more, changed(weights, 0.25))).version == newest + more
        with pytest.raises(VersionConflict, match=f"not newer than the newest committed version {newest + more}"):
            await ingest.transfer.finish(None)

    async def test_a_repeated_start_replaces_an_overtaken_update(self, ingest, joined, newest, weights):
        await ingest.transfer.start()
        await Trainer(ingest).push(newest + 1, weights)
        assert (await push(ingest, joined, weights)).version == newest + 2

    @pytest.mark.parametrize("label", [None, "run/step-7", "not a label"])
    async def test_an_upload_of_its_number_is_not_committed_for_it(self, ingest, joined, newest, weights, label):
        await ingest.transfer.start()
        await send(ingest, joined, weights)
        await Trainer(ingest).upload(newest + 1, weights)
        with pytest.raises(NotFound, match=f"version {newest + 1} is staged by somebody else now"):
            await ingest.transfer.finish(label)
        assert (await ingest.commit(newest + 1, CommitUpload())).label is None

    async def test_a_label_of_a_staged_version_is_refused(self, ingest, joined, newest, weights):
        await Trainer(ingest).upload(newest + 3, weights, order=[0])
        with pytest.raises(VersionConflict, match=f"version {newest + 3} is being uploaded by somebody else"):
            await push(ingest, joined, weights, str(newest + 3))
        await ingest.discard(newest + 3)

    async def test_a_broadcast_is_committed_by_finish_alone_and_dropped_by_a_start(
        self, ingest, joined, newest, weights
    ):
        await ingest.transfer.start()
        await send(ingest, joined, {UP_PROJ: weights[UP_PROJ]})
        with pytest.raises(UploadIncomplete, match="POST /finish_weight_update commits it"):
            await ingest.commit(newest + 1, CommitUpload())
        assert (await push(ingest, joined, weights)).version == newest + 1
