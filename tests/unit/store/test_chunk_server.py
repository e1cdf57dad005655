"""The ingest hands out files of its log through Ray's object store."""

import asyncio
import errno
from pathlib import Path

import numpy as np
import pytest
import ray

from rollout_service.errors import LogCorrupt, NotFound, NotReady
from rollout_service.protocol.weight_log import Control
from rollout_service.store import chunk_server
from rollout_service.store.chunk_server import ChunkServer
from rollout_service.store.log import WeightLog
from tests.unit.ingest.trainer import settle
from tests.unit.store.versions import commit

pytestmark = pytest.mark.usefixtures("object_store")
CHUNK_BYTES = 64
FILE = "weights-00001.safetensors"


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    log = WeightLog(tmp_path / "log")
    commit(log, 3, mode="wait")
    log.sign()
    return log


@pytest.fixture
def offered(log: WeightLog) -> ChunkServer:
    return ChunkServer(log, CHUNK_BYTES)


def test_the_newest_version_is_sent_with_its_log_and_control(log, offered):
    log.set_control(Control(paused=True, mode="abort"))
    newest = offered.newest()
    assert (newest.head.version, newest.head.mode, newest.control.mode) == (3, "wait", "abort")
    assert newest.origin == log.origin()


def test_a_log_keeps_its_name_and_gets_a_new_writer_each_start(log):
    before = log.origin()
    after = log.sign()
    assert before is not None and after.log == before.log and after.writer != before.writer
    assert log.origin() == after


def test_before_version_0_there_is_nothing_to_tell(tmp_path):
    log = WeightLog(tmp_path / "empty")
    log.sign()
    with pytest.raises(NotReady, match="version 0 is still being made"):
        ChunkServer(log).newest()


def test_a_temporary_file_beside_a_manifest_is_not_offered(log, offered):
    before = offered.files(3)
    (log.folder(3) / ".manifest.json.tmp").write_text("{")
    assert offered.files(3) == before


async def test_the_chunks_of_all_files_are_their_bytes(log, offered):
    files = offered.files(3)
    assert {"manifest.json", FILE} <= {file.name for file in files}
    for file in files:
        read = b""
        for index in range(-(-file.nbytes // CHUNK_BYTES)):
            (ref,) = await offered.chunk(3, file.name, index)
            chunk: np.ndarray = ray.get(ref)
            assert chunk.dtype == np.uint8 and chunk.nbytes <= CHUNK_BYTES
            read += chunk.tobytes()
        assert read == (log.folder(3) / file.name).read_bytes()


async def test_nodes_that_copy_side_by_side_get_the_same_object(offered):
    replies = await asyncio.gather(*(offered.chunk(3, FILE, 0) for _ in range(8)))
    assert len({reply[0] for reply in replies}) == 1


async def test_few_references_are_held_and_none_for_long(log, offered, monkeypatch):
    first = (await offered.chunk(3, "manifest.json", 0))[0]
    for index in range(1, chunk_server.HELD_CHUNKS + 1):
        await offered.chunk(3, "manifest.json", index)
    assert len(offered._held) == chunk_server.HELD_CHUNKS
    assert (await offered.chunk(3, "manifest.json", 0))[0] != first
    monkeypatch.setattr(chunk_server, "HELD_S", 0.0)
    brief = ChunkServer(log, CHUNK_BYTES)
    await brief.chunk(3, FILE, 0)
    await settle()
    assert brief._held == {}


async def test_what_is_not_in_the_log_is_not_handed_out(log, offered):
    with pytest.raises(NotFound, match="version 7 is not in the log"):
        offered.files(7)
    with pytest.raises(NotFound, match="version 7 is not in the log"):
        await offered.chunk(7, FILE, 0)
    for name in ("../LATEST", "/etc/passwd", "weights-00002.safetensors"):
        with pytest.raises(NotFound, match="has no file"):
            await offered.chunk(3, name, 0)


async def test_an_unreadable_file_is_named_and_readable_once_repaired(offered, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(chunk_server.np, "fromfile", _fail)
        with pytest.raises(LogCorrupt, match=f"version 3: {FILE} cannot be read"):
            await offered.chunk(3, FILE, 0)
    assert await offered.chunk(3, FILE, 0)


def _fail(*_: object, **__: object) -> np.ndarray:
    raise OSError(errno.EIO, "Input/output error")
