"""Versions from folders that a trainer tells the path of: the number of each, and when one is told again."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    CommitTimeout,
    Forbidden,
    InvalidManifest,
    NotFound,
    QuantizationError,
    VersionConflict,
)
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import CommitUpload
from rollout_service.protocol.weights import WeightStatus
from rollout_service.store.log import WeightLog
from rollout_service.store.upload_record import RECORD_FILE
from tests.unit.ingest import expected
from tests.unit.ingest.trainer import Weights, begin_of, changed, config_of, replica, settle, started

NOW = CommitUpload()
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the trainer writes."""
    (tmp_path / "broadcasts").mkdir()
    return tmp_path / "broadcasts"


@pytest.fixture
def config(model: Path, tmp_path: Path, root: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log", weights={"source_roots": [root]}).resolved()


def saved(root: Path, name: str, weights: Weights) -> Path:
    """A folder of these weights."""
    (root / name).mkdir(exist_ok=True)
    save_file(dict(weights), root / name / "model.safetensors")
    return root / name


async def pushed(ingest: Ingest, folder: Path, number: int | None = None) -> int:
    return (await ingest.push_folder(folder, NOW, number)).version


async def test_the_folder_may_go_once_the_call_has_returned(ingest, root, weights, fingerprint):
    sent = changed(weights, 0.5)
    folder = saved(root, "step_7", sent)
    await pushed(ingest, folder, 7)
    shutil.rmtree(folder)
    assert (await ingest.status(7)).digest == expected.digest(sent, fingerprint)
    with pytest.raises(NotFound, match="is not a folder"):
        await pushed(ingest, folder, 7)


async def test_without_a_newer_number_a_version_has_the_next(ingest, root, weights):
    assert await pushed(ingest, saved(root, "a", weights), 7) == 7
    for i, number in enumerate((None, 0, 3, 7), start=1):
        assert await pushed(ingest, saved(root, f"a{i}", changed(weights, float(i))), number) == 7 + i


async def test_a_damaged_record_of_the_newest_version_stops_no_push(config, root, weights):
    async with started(config) as ingest:
        await pushed(ingest, saved(root, "a", weights))
    record = WeightLog(config.weights.root_here()).folder(1) / RECORD_FILE
    record.write_text("{")
    async with started(config) as again:
        assert await pushed(again, saved(root, "b", changed(weights, 1.0))) == 2


@pytest.mark.parametrize("how", ["in place", "by a rename"])
async def test_a_rewrite_with_the_same_sizes_and_times_is_a_new_version(ingest, root, weights, fingerprint, how):
    folder, sent = saved(root, "latest", weights), changed(weights, 1.0)
    assert await pushed(ingest, folder) == 1
    before = (folder / "model.safetensors").stat()
    target = folder / ("model.safetensors" if how == "in place" else "new")
    save_file(dict(sent), target)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    target.rename(folder / "model.safetensors")
    assert await pushed(ingest, folder) == 2
    assert (await ingest.status(2)).digest == expected.digest(sent, fingerprint)


async def test_the_same_folder_again_is_the_same_version(ingest, root, weights, restarted):
    folder = saved(root, "step_7", weights)
    assert await asyncio.gather(*(pushed(ingest, folder, 7) for _ in range(3))) == [7, 7, 7]
    (folder / "STABLE").touch()  # markers of the trainer's are no weights
    assert await pushed(ingest, folder) == 7
    assert await pushed(ingest, root / "." / "step_7" / ".." / "step_7", 9) == 7
    (root / "latest").symlink_to(folder)
    assert await pushed(ingest, root / "latest") == 7
    assert [status.version for status in await ingest.versions()] == [0, 7]
    again = await restarted()
    assert await pushed(again, folder, 7) == 7
    (root / "latest").unlink()
    (root / "latest").symlink_to(saved(root, "b", changed(weights, 1.0)))
    assert await pushed(again, root / "latest") == 8
    assert await pushed(again, root / "b") == 8


async def test_a_repeat_waits_for_the_replicas_too(ingest, root, weights):
    folder = saved(root, "step_7", weights)
    await ingest.report(replica("a", 0))
    with pytest.raises(CommitTimeout):
        await ingest.push_folder(folder, CommitUpload(wait="all", timeout_s=0.01), 7)
    repeat = asyncio.create_task(ingest.push_folder(folder, CommitUpload(wait="all", timeout_s=60.0), 7))
    await settle()
    assert not repeat.done()
    digest = (await ingest.status(7)).digest
    await ingest.report(replica("a", 7, 1, digest=digest))
    assert (await repeat).state == "live"


async def test_going_back_to_an_earlier_folder_serves_it_anew(ingest, root, weights, fingerprint):
    first = saved(root, "step_1", weights)
    assert await pushed(ingest, first, 1) == 1
    assert await pushed(ingest, saved(root, "step_2", changed(weights, 1.0)), 2) == 2
    status = await ingest.push_folder(first, NOW, 1)
    assert status.version == 3 and status.digest == expected.digest(weights, fingerprint)


async def test_a_number_that_another_upload_has_is_passed_over(ingest, root, weights):
    await ingest.begin(begin_of(7, changed(weights, 1.0)))
    assert await pushed(ingest, saved(root, "step_7", weights), 7) == 8
    assert [status.version for status in await ingest.versions()] == [0, 8]


async def test_a_folder_is_not_taken_for_an_upload_that_replaced_it(ingest, trainer, root, weights, monkeypatch):
    commit = ingest.commit

    async def replaced(version: int, request: CommitUpload) -> WeightStatus:
        await trainer.upload(version, weights)
        return await commit(version, request)

    monkeypatch.setattr(ingest, "commit", replaced)
    with pytest.raises(VersionConflict, match=r"announced again since: .* nothing was committed"):
        await pushed(ingest, saved(root, "step_7", changed(weights, 1.0)), 7)
    assert (await ingest.status(7)).state == "staged"


async def test_a_folder_that_failed_is_read_anew_once_mended(ingest, root, weights, fingerprint):
    broken = changed(weights, 0.0)
    broken[UP_PROJ][3, 5] = float("nan")
    folder = saved(root, "step_7", broken)
    for _ in range(2):
        with pytest.raises(QuantizationError, match="is nan"):
            await pushed(ingest, folder, 7)
    status = await ingest.push_folder(saved(root, "step_7", weights), NOW, 7)
    assert status.version == 7 and status.digest == expected.digest(weights, fingerprint)


async def test_a_folder_rewritten_for_another_model_leaves_what_is_staged_of_it(ingest, root, weights):
    await ingest.begin_folder(saved(root, "step_7", weights), 7, None, pulled=False)
    with pytest.raises(InvalidManifest):
        await pushed(ingest, saved(root, "step_7", {"other": weights[UP_PROJ]}), 7)
    assert [status.version for status in await ingest.versions()] == [0, 7]


async def test_a_folder_elsewhere_or_of_another_model_leaves_nothing_staged(ingest, root, weights, model):
    with pytest.raises(Forbidden, match=r"is not below weights\.source_roots \(.*broadcasts\): .*set it to a folder"):
        await pushed(ingest, model, 7)
    with pytest.raises(InvalidManifest):
        await pushed(ingest, saved(root, "step_7", {"other": weights[UP_PROJ]}), 7)
    assert [status.version for status in await ingest.versions()] == [0]
