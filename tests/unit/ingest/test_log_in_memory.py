"""An ingest whose log is in memory: the same versions as on a disk, written into files of dropped ones."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollout_service.config import ServiceConfig
from rollout_service.ingest.conversion import Bucket
from rollout_service.ingest.resources import Resources
from rollout_service.ingest.sources.folder import FolderSource
from rollout_service.protocol.upload import CommitUpload
from rollout_service.store.log import WeightLog
from rollout_service.store.upload_progress import PROGRESS_FILE
from rollout_service.store.upload_record import STAGED_FILE
from tests.unit.ingest.test_ingest_delta import DeltaTrainer, require_stored
from tests.unit.ingest.trainer import Trainer, Weights, changed, config_of, scattered, started


async def pushed(config: ServiceConfig, weights: Weights, versions: int) -> tuple[list[str | None], list[set[int]]]:
    """Digests of versions 1 to ``versions``, and the files that each lay in."""
    log, digests, inodes = WeightLog(config.weights.root), [], []
    async with started(config) as ingest:
        for version in range(1, versions + 1):
            status = await Trainer(ingest).push(version, changed(weights, version / 64))
            digests.append(status.digest)
            inodes.append({path.stat().st_ino for path in log.folder(version).glob("*.safetensors")})
            log.verify(log.manifest(version))
    return digests, inodes


async def test_versions_are_those_of_a_disk_in_files_of_dropped_ones(model, weights, memory, tmp_path):
    digests, inodes = await pushed(config_of(model, memory), weights, 6)
    on_disk, _ = await pushed(config_of(model, tmp_path / "log"), weights, 2)
    assert digests[:2] == on_disk and len(set(digests)) == 6 and None not in on_disk
    assert len(set.union(*inodes)) == 3 * len(inodes[0])  # two are kept, and one is being written


class NoBuffers:
    """Where tensors are made that would then be copied."""

    def take(self, nbytes: int) -> memoryview:
        raise AssertionError(f"{nbytes} bytes are made elsewhere")


async def test_deltas_are_applied_where_their_versions_lie(model, weights, memory, tmp_path, monkeypatch):
    digests: dict[Path, list[str | None]] = {}
    for folder in (tmp_path / "log", memory):
        config = config_of(model, folder, weights={"part_bytes": 4 << 10})
        async with started(config) as ingest:
            trainer, log = DeltaTrainer(ingest), WeightLog(folder)
            old = await trainer.stored(changed(weights, 1 / 64))
            digests[folder] = [(await trainer.push(1, old)).digest]
            if folder == memory:
                monkeypatch.setattr("rollout_service.ingest.sources.delta.ThreadBuffers", NoBuffers)
            for version in range(2, 6):
                new = await trainer.stored(scattered(changed(weights, 1 / 64), version))
                digests[folder].append((await trainer.push_delta(version, version - 1, old, new)).digest)
                require_stored(log, version, new)
                old = new
    assert digests[memory] == digests[tmp_path / "log"]


async def test_a_renumbered_upload_touches_no_other_of_its_old_number(model, weights, memory):
    async with started(config_of(model, memory)) as ingest:
        await Trainer(ingest).upload(8, weights, order=[0])
        staged, source = await ingest.begin_broadcast(), FolderSource(model)
        assert staged.begin.version == 9
        await ingest._uploads.renumber(staged, 5)
        await Trainer(ingest).upload(9, weights, order=[0])
        names = [tensor.name for tensor in source.table]
        staged.convert(Bucket(names, partial(source.read, names)))
        staged.all_came()
        await ingest.commit(5, CommitUpload(), staged)
        staging = memory / "staging"
        assert (staging / "9" / PROGRESS_FILE).exists() and (staging / "9.parts" / STAGED_FILE).exists()
        assert not (WeightLog(memory).folder(5) / PROGRESS_FILE).exists()


async def test_an_ingest_that_starts_anew_uses_the_files_again(model, weights, memory):
    _, before = await pushed(config_of(model, memory), weights, 4)
    async with started(config_of(model, memory)) as ingest:
        await Trainer(ingest).push(9, weights)
    log = WeightLog(memory)
    assert {path.stat().st_ino for path in log.folder(9).glob("*.safetensors")} <= set.union(*before)
    log.verify(log.manifest(9))


async def test_memory_that_cannot_be_prepared_is_logged_and_not_needed(model, weights, memory, monkeypatch, caplog):
    tried = threading.Event()

    def fail(self: Resources, is_stopped: Callable[[], bool]) -> None:
        tried.set()
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Resources, "prepare_memory", fail)
    async with started(config_of(model, memory)) as ingest:
        await asyncio.to_thread(tried.wait)
        assert (await Trainer(ingest).push(1, changed(weights, 1 / 64))).digest is not None
    [said] = [each for each in caplog.records if "no memory is prepared" in each.message]
    assert said.exc_info is not None and str(said.exc_info[1]) == "no compiler"
