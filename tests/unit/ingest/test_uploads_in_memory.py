"""Uploads into a log in memory (a tmpfs), where files of parts are used again by the next upload."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout_service.config import ServiceConfig
from rollout_service.ingest.ingest import Ingest
from rollout_service.protocol.upload import UPLOADER_HEADER, CommitUpload, part_size
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import Trainer, Weights, begin_of, changed, config_of, stream_of


@pytest.fixture
def config(model: Path) -> Iterator[ServiceConfig]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        yield config_of(model, Path(root))


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.iterdir() if path.name != "upload.json"}


def open_names(root: Path) -> list[str]:
    """Paths below ``root`` of the files that this process has open."""
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return [path.removeprefix(str(root)) for path in opened if path.startswith(str(root))]


async def test_the_next_upload_has_the_same_files_and_its_own_bytes(
    ingest: Ingest, trainer: Trainer, weights: Weights, log: WeightLog
) -> None:
    staging = log.root / "staging"
    await trainer.upload(1, weights)
    first = inodes(staging / "1.parts")
    before = await ingest.commit(1, CommitUpload())
    assert inodes(staging / "kept-parts") == first
    plan = await trainer.upload(2, changed(weights, 0.5))
    assert inodes(staging / "2.parts") == first and not any((staging / "kept-parts").iterdir())
    again = await ingest.commit(2, CommitUpload())
    assert plan.num_parts == len(first) and not any("part" in name for name in open_names(log.root))
    other = await trainer.push(3, changed(weights, 0.5))
    assert again.digest == other.digest != before.digest
    for version in (2, 3):
        log.verify(log.manifest(version))


async def test_what_a_crash_leaves_of_a_file_that_is_used_again_is_no_part(
    config: ServiceConfig, weights: Weights, log: WeightLog
) -> None:
    before = Ingest(config)
    await before.start()
    await Trainer(before).push(1, weights)
    await Trainer(before).upload(2, changed(weights, 0.5), order=[0])
    staged = before.staged(2)
    path = staged.incoming_path(1)
    incoming = staged.space.receive(path, part_size(1, staged.begin.nbytes, staged.part_bytes))
    assert incoming.memory is not None and any(incoming.memory)  # of version 1
    await before.stop()  # nobody releases what was being received: so does a crash leave it
    after = Ingest(config)
    await after.start()
    plan = await after.begin(begin_of(2, changed(weights, 0.5)))
    assert set(plan.digests) == {0} and not path.exists() and not (log.root / "staging" / "kept-parts").exists()
    stream = stream_of(changed(weights, 0.5))
    for part in plan.missing_parts:
        data = stream[part * plan.part_bytes : (part + 1) * plan.part_bytes]
        assert (await Trainer(after).put(2, part, data)).status_code == 200
    committed = await after.commit(2, CommitUpload())
    assert committed.digest == (await Trainer(after).push(3, changed(weights, 0.5))).digest
    await after.stop()


async def test_a_discarded_upload_leaves_its_files_to_the_next(
    ingest: Ingest, trainer: Trainer, weights: Weights, log: WeightLog
) -> None:
    await trainer.upload(1, weights, order=[0, 1])
    first = inodes(log.root / "staging" / "1.parts")
    await ingest.discard(1)
    await trainer.upload(2, weights, order=[2, 3])
    assert inodes(log.root / "staging" / "2.parts") == first


async def test_what_a_refused_part_left_where_a_tensor_is_stored_is_written_over(
    model: Path, weights: Weights, log: WeightLog
) -> None:
    """A tensor that is stored as it comes is put together in the version's file before its numbers are looked at."""
    name = "model.embed_tokens.weight"
    other = {**weights, name: torch.full_like(weights[name], torch.nan)}
    ingest = Ingest(config_of(model, log.root, weights={"part_bytes": 48 << 10}))
    await ingest.start()
    trainer, first = Trainer(ingest), begin_of(1, weights).model_copy(update={"uploader": "first"})
    plan = await ingest.begin(first)
    for uploader, stream in (("second", stream_of(other)), ("first", stream_of(weights))):
        for part in range(plan.num_parts):
            data = stream[part * plan.part_bytes : (part + 1) * plan.part_bytes]
            reply = await trainer.put(1, part, data, **{UPLOADER_HEADER: uploader})
            assert reply.status_code == 200, reply.text
        if uploader == "second":
            async with asyncio.timeout(60):
                while (failure := ingest.staged(1).failure) is None:
                    await asyncio.sleep(0)
            files = (log.root / "staging" / "1").glob("*.safetensors")
            assert any(b"\xc0\x7f" * 1000 in file.read_bytes() for file in files)
            assert name in failure.message
    committed = await ingest.commit(1, CommitUpload())
    log.verify(log.manifest(1))
    assert committed.digest == (await trainer.push(2, weights)).digest
    await ingest.stop()
