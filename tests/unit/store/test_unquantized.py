"""With a shadow, the newest versions are kept as the trainer sent them; that never costs a version."""

import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout_service.config import ServiceConfig
from rollout_service.errors import QuantizationError
from rollout_service.ingest.ingest import Ingest
from rollout_service.model.convert import Converter
from rollout_service.store import unquantized
from rollout_service.store.log import WeightLog
from rollout_service.store.unquantized import unquantized_root
from tests.unit.ingest.trainer import Trainer, Weights, changed, config_of

SHADOW: dict[str, object] = {"share": 0.05}
CODES_WARNING = "comes as codes"


@pytest.fixture
def config(model: Path, tmp_path: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log", shadow=SHADOW)


@pytest.fixture
def kept(config: ServiceConfig) -> WeightLog:
    """What the shadow follows."""
    return WeightLog(unquantized_root(config.weights.root))


@pytest.fixture
async def started(config: ServiceConfig) -> AsyncIterator[Ingest]:
    ingest = Ingest(config)
    await ingest.start()
    yield ingest
    await ingest.stop()


def stored(log: WeightLog, version: int) -> dict[str, torch.Tensor]:
    log.verify(log.manifest(version))
    return {n: t for file in log.manifest(version).files() for n, t in load_file(log.folder(version) / file).items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class TestKept:
    async def test_what_is_kept_is_what_the_trainer_sent(
        self, started: Ingest, kept: WeightLog, weights: Weights
    ) -> None:
        assert same(stored(kept, 0), weights)
        sent = changed(weights, 0.25)
        await Trainer(started).push(1, sent)
        assert same(stored(kept, 1), sent)
        head = kept.head()
        assert head is not None and (head.version, head.mode) == (1, "wait")
        manifest = kept.manifest(1)
        assert manifest.recipe.weights == "none" and manifest.fingerprint

    async def test_experts_are_kept_one_by_one(self, moe_model: Path, tmp_path: Path) -> None:
        ingest = Ingest(config_of(moe_model, tmp_path / "log", shadow=SHADOW))
        await ingest.start()
        assert same(
            stored(WeightLog(unquantized_root(tmp_path / "log")), 0), load_file(moe_model / "model.safetensors")
        )
        await ingest.stop()

    async def test_a_tied_head_is_kept_too(self, tied_model: Path, tmp_path: Path) -> None:
        ingest = Ingest(config_of(tied_model, tmp_path / "log", shadow=SHADOW))
        await ingest.start()
        tensors = stored(WeightLog(unquantized_root(tmp_path / "log")), 0)
        assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        await ingest.stop()

    async def test_the_newest_two_are_kept(self, started: Ingest, kept: WeightLog, weights: Weights) -> None:
        for version in range(1, 5):
            await Trainer(started).push(version, weights)
        assert kept.versions() == [3, 4]

    async def test_fp8_codes_are_not_kept_and_one_warning_says_so(
        self, started: Ingest, kept: WeightLog, weights: Weights, caplog: pytest.LogCaptureFixture
    ) -> None:
        codes = dict(Converter(await started.recipe()).convert(weights.items()))
        with caplog.at_level(logging.WARNING):
            await Trainer(started).push(1, codes)
            await Trainer(started).push(2, codes)
        assert kept.versions() == [0]
        assert sum(CODES_WARNING in record.getMessage() for record in caplog.records) == 1

    async def test_a_version_that_is_refused_or_discarded_leaves_nothing(
        self, started: Ingest, kept: WeightLog, weights: Weights
    ) -> None:
        broken = changed(weights, float("nan"))
        await Trainer(started).upload(1, broken)
        with pytest.raises(QuantizationError):
            await Trainer(started).push(2, broken)
        for version in (1, 2):
            await started.discard(version)
        assert kept.versions() == [0] and list(kept.staging(0).parent.iterdir()) == []

    async def test_a_full_disk_costs_the_comparison_and_not_the_version(
        self,
        started: Ingest,
        kept: WeightLog,
        weights: Weights,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(unquantized, "VersionWriter", full)
        with caplog.at_level(logging.WARNING):
            assert (await Trainer(started).push(1, weights)).state in ("committed", "live")
        assert kept.versions() == [0] and "version 1 is not kept unquantized" in caplog.text

    async def test_a_service_without_a_shadow_keeps_no_unquantized_weights(
        self, config: ServiceConfig, kept: WeightLog, weights: Weights
    ) -> None:
        with_shadow = Ingest(config)
        await with_shadow.start()
        await with_shadow.stop()
        assert kept.root.is_dir()
        without = Ingest(config.model_copy(update={"shadow": type(config.shadow)()}))
        await without.start()
        await Trainer(without).push(1, weights)
        assert not kept.root.exists()
        await without.stop()


class TestRestart:
    async def test_an_upload_that_outlives_the_ingest_is_kept_in_full(
        self, config: ServiceConfig, kept: WeightLog, weights: Weights
    ) -> None:
        first = Ingest(config)
        await first.start()
        plan = await Trainer(first).upload(1, weights, order=[0, 2])
        await first.stop()
        again = Ingest(config)
        await again.start()
        assert plan.num_parts > 3
        await Trainer(again).push(1, weights)
        assert same(stored(kept, 1), weights)
        await again.stop()

    async def test_the_ingest_starts_after_a_crash_before_the_first_commit(
        self, config: ServiceConfig, kept: WeightLog, weights: Weights
    ) -> None:
        first = Ingest(config)
        await first.start()
        await Trainer(first).push(1, weights)
        await first.stop()
        (kept.root / "LATEST").unlink()
        again = Ingest(config)
        await again.start()
        await Trainer(again).push(2, weights)
        assert kept.versions() == [2]
        await again.stop()

    async def test_versions_that_are_others_in_a_restored_log_are_not_kept(
        self, config: ServiceConfig, kept: WeightLog, weights: Weights, tmp_path: Path
    ) -> None:
        log = WeightLog(config.weights.root)
        first = Ingest(config)
        await first.start()
        await Trainer(first).push(1, weights)
        await first.stop()
        shutil.copytree(log.root, tmp_path / "backup")
        second = Ingest(config)
        await second.start()
        await Trainer(second).push(2, weights)
        await Trainer(second).push(3, weights)
        await second.stop()
        assert kept.versions() == [2, 3]
        kept.root.rename(tmp_path / "kept")  # the shadow's was in no backup
        shutil.rmtree(log.root)
        (tmp_path / "backup").rename(log.root)
        shutil.rmtree(kept.root)
        (tmp_path / "kept").rename(kept.root)
        again = Ingest(config)
        await again.start()
        assert kept.versions() == [] and kept.head() is None
        sent = changed(weights, 0.25)
        await Trainer(again).push(2, sent)
        assert same(stored(kept, 2), sent)
        await again.stop()

    async def test_the_ingest_starts_even_if_the_disk_cannot_be_cleared(
        self, config: ServiceConfig, kept: WeightLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = Ingest(config)
        await first.start()
        await first.stop()

        def failing(log: WeightLog) -> None:
            if log.root == kept.root:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(WeightLog, "remove_uncommitted", failing)
        again = Ingest(config)
        await again.start()
        assert (await again.fleet()).latest_version == 0
        await again.stop()
