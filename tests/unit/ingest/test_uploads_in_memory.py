"""Uploads into a log in memory (a tmpfs), where files of parts are used again by the next upload."""

import os
from pathlib import Path

import pytest

from rollout_service.config import ServiceConfig
from rollout_service.protocol.upload import CommitUpload
from rollout_service.store.upload_record import STAGED_FILE
from tests.unit.ingest.trainer import PART_BYTES, Trainer, begin_of, changed, config_of, parts_of, started


@pytest.fixture
def config(model: Path, memory: Path) -> ServiceConfig:
    return config_of(model, memory)


def inode(path: Path) -> int:
    return path.stat().st_ino


def open_names(root: Path) -> list[str]:
    """Paths below ``root`` of the files that this process has open."""
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return [path.removeprefix(str(root)) for path in opened if path.startswith(str(root))]


async def test_the_next_upload_has_the_same_file_and_its_own_bytes(ingest, trainer, weights, log):
    staging = log.root / "staging"
    await trainer.upload(1, weights)
    first = inode(staging / "1.parts" / STAGED_FILE)
    before = await ingest.commit(1, CommitUpload())
    assert inode(staging / "kept") == first
    await trainer.upload(2, changed(weights, 0.5))
    assert inode(staging / "2.parts" / STAGED_FILE) == first and not (staging / "kept").exists()
    again = await ingest.commit(2, CommitUpload())
    assert [name for name in open_names(log.root) if "staging" in name] == ["/staging/kept"] * 2  # with its mapping
    other = await trainer.push(3, changed(weights, 0.5))
    assert again.digest == other.digest != before.digest
    for version in (2, 3):
        log.verify(log.manifest(version))


async def test_what_a_crash_leaves_in_a_reused_file_is_no_part(config, weights, log):
    async with started(config) as before:
        await Trainer(before).push(1, weights)
        await Trainer(before).upload(2, changed(weights, 0.5), order=[0])
        parts = before.staged(2).parts
        incoming = parts.begin(1, config.weights.part_bytes, lambda: None)
        incoming.open()
        assert incoming.memory is not None and any(incoming.memory)  # of version 1
    async with started(config) as after:
        plan = await after.begin(begin_of(2, changed(weights, 0.5)))
        assert set(plan.digests) == {0}
        await Trainer(after).send(plan, parts_of(changed(weights, 0.5)))
        committed = await after.commit(2, CommitUpload())
        assert committed.digest == (await Trainer(after).push(3, changed(weights, 0.5))).digest


async def test_a_discarded_upload_leaves_its_file_to_the_next(ingest, trainer, weights, log):
    await trainer.upload(1, weights, order=[0, 1])
    first = inode(log.root / "staging" / "1.parts" / STAGED_FILE)
    await ingest.discard(1)
    await trainer.upload(2, weights, order=[2, 3])
    assert inode(log.root / "staging" / "2.parts" / STAGED_FILE) == first


async def test_a_file_that_a_sender_still_writes_is_not_reused(ingest, trainer, weights, log):
    await trainer.upload(1, weights, order=[0])
    incoming = ingest.staged(1).parts.begin(1, PART_BYTES, lambda: None)
    incoming.open()
    assert incoming.memory is not None
    await ingest.discard(1)
    assert not (log.root / "staging" / "kept").exists()
    await trainer.upload(2, weights)
    incoming.memory[:] = bytes(PART_BYTES)
    assert (await ingest.commit(2, CommitUpload())).digest == (await trainer.push(3, weights)).digest
