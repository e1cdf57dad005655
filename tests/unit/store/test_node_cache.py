"""The ingest hands out files through Ray's object store, and nodes without the log share copies of them."""

import asyncio
import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.exceptions import ObjectStoreFullError

from rollout_service.config.service import AUTO, WeightsConfig
from rollout_service.errors import InsufficientStorage, LogCorrupt, NotFound, NotReady
from rollout_service.protocol.weight_log import Control, Head
from rollout_service.store import node_cache as module
from rollout_service.store.durable_io import WriterLock
from rollout_service.store.log import WeightLog
from rollout_service.store.node_cache import ChunkServer, NodeCache, find_log
from tests.unit.ingest.trainer import settle, untouched_files
from tests.unit.store.offering import CHUNK_BYTES, OfferingIngest
from tests.unit.store.versions import FIRST, commit, flip_a_byte, restored

pytestmark = pytest.mark.usefixtures("object_store")


@pytest.fixture
def log(tmp_path: Path) -> WeightLog:
    """The ingest's."""
    log = WeightLog(tmp_path / "ingest")
    commit(log, 0)
    log.sign()
    return log


@pytest.fixture
def ingest(log: WeightLog) -> OfferingIngest:
    return OfferingIngest(ChunkServer(log, CHUNK_BYTES))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The root on another node."""
    return tmp_path / "node"


def copies_on(node: Path, ingest: OfferingIngest) -> NodeCache:
    """Of one replica there."""
    return NodeCache(node, ingest, ingest.served.newest(), CHUNK_BYTES)


@pytest.fixture
def copies(node: Path, ingest: OfferingIngest) -> NodeCache:
    return copies_on(node, ingest)


def head_of(log: WeightLog) -> Head:
    head = log.head()
    assert head is not None
    return head


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def following(root: Path, poll_s: float = 0.01) -> WeightsConfig:
    return WeightsConfig(root=root, poll_s=poll_s)


FILE = "weights-00001.safetensors"


class TestChunkServer:
    def test_the_newest_version_is_sent_with_its_log_and_control(self, log, ingest, tmp_path):
        before = log.origin()
        log.set_control(Control(paused=True, mode="abort"))
        newest = ingest.served.newest()
        assert (newest.head, newest.control, newest.origin) == (log.head(), Control(paused=True, mode="abort"), before)
        after = log.sign()  # by the next process that writes it
        assert before is not None and after.log == before.log and after.writer != before.writer
        assert ingest.served.newest().origin == after
        empty = WeightLog(tmp_path / "empty")
        empty.sign()
        with pytest.raises(NotReady, match="version 0 is still being made"):
            ChunkServer(empty).newest()

    async def test_the_chunks_of_all_files_are_their_bytes(self, log, ingest):
        (log.folder(0) / ".manifest.json.tmp").write_text("{")
        files = ingest.served.files(0)
        assert {file.name for file in files} == {"manifest.json", FILE}
        for file in files:
            read = b""
            for index in range(-(-file.nbytes // CHUNK_BYTES)):
                (ref,) = await ingest.served.chunk(0, file.name, index)
                chunk: np.ndarray = ray.get(ref)
                assert chunk.dtype == np.uint8 and chunk.nbytes <= CHUNK_BYTES
                read += chunk.tobytes()
            assert read == (log.folder(0) / file.name).read_bytes()

    async def test_an_object_is_shared_and_few_are_held_and_none_for_long(self, log, ingest, monkeypatch):
        served = ingest.served
        replies = await asyncio.gather(*(served.chunk(0, "manifest.json", 0) for _ in range(8)))
        assert len({reply[0] for reply in replies}) == 1
        for index in range(1, module.HELD_CHUNKS + 1):
            await served.chunk(0, "manifest.json", index)
        assert len(served._held) == module.HELD_CHUNKS
        assert (await served.chunk(0, "manifest.json", 0))[0] != replies[0][0]
        monkeypatch.setattr(module, "HELD_S", 0.0)
        brief = ChunkServer(log, CHUNK_BYTES)
        await brief.chunk(0, FILE, 0)
        await settle()
        assert brief._held == {}

    async def test_what_is_not_in_the_log_is_not_handed_out(self, ingest):
        with pytest.raises(NotFound, match="version 7 is not in the log"):
            await ingest.served.chunk(7, FILE, 0)
        for name in ("../LATEST", "/etc/passwd", "weights-00002.safetensors"):
            with pytest.raises(NotFound, match="has no file"):
                await ingest.served.chunk(0, name, 0)

    async def test_an_unreadable_file_is_named_and_readable_once_repaired(self, ingest, monkeypatch):
        def fail(*_: object, **__: object) -> np.ndarray:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(module.np, "fromfile", fail)
            with pytest.raises(LogCorrupt, match=f"version 0: {FILE} cannot be read"):
                await ingest.served.chunk(0, FILE, 0)
        assert await ingest.served.chunk(0, FILE, 0)


class TestWhoseLog:
    @pytest.mark.parametrize("is_auto", [False, True])
    async def test_a_replica_that_sees_the_ingests_log_needs_no_copies(self, log, ingest, is_auto):
        root = AUTO if is_auto else log.root
        assert await find_log(following(root), ingest) == (following(log.root), None)

    @pytest.mark.parametrize("cloned", [False, True], ids=["empty", "clone of an older state"])
    async def test_a_replica_that_does_not_see_it_has_a_folder_of_copies(self, log, ingest, node, cloned):
        if cloned:
            shutil.copytree(log.root, node)
            log.sign()
        _, copies = await find_log(following(node), ingest)
        assert copies is not None and copies.log.root.parent == node / "copies"
        assert copies.newest.head == log.head()

    async def test_an_ingest_restart_while_comparing_is_not_another_ingest(self, log, ingest):
        told = ingest.served.newest()
        log.sign()
        ingest.answers = [told]
        assert await find_log(following(log.root), ingest) == (following(log.root), None)

    async def test_a_replica_waits_for_an_ingest_that_is_away(self, log, ingest):
        ingest.unreachable = NotReady("it died with this call")
        waiting = asyncio.create_task(find_log(following(log.root, poll_s=0.001), ingest))
        for _ in range(2):  # it asks again
            await ingest.has_refused()
        assert not waiting.done()
        ingest.unreachable = None
        _, copies = await asyncio.wait_for(waiting, 30)
        assert copies is None

    async def test_an_ingest_that_has_lost_its_log_is_not_followed(self, copies, ingest, log, tmp_path):
        await copies.look()
        other = WeightLog(tmp_path / "other")
        commit(other, 0)
        other.sign()
        ingest.served = ChunkServer(other, CHUNK_BYTES)
        with pytest.raises(LogCorrupt, match="the ingest writes another log now"):
            await copies.look()
        assert copies.newest.head == log.head()


class TestFetch:
    async def test_replicas_of_a_node_fetch_a_version_once_with_all_its_files(self, node, ingest, copies, log):
        others, old = [copies_on(node, ingest) for _ in range(3)], head_of(log)
        commit(log, 1)
        await asyncio.gather(*(each.fetch(head_of(log)) for each in [copies, *others]))
        assert len(ingest.chunks) == len(set(ingest.chunks)) > 2
        await copies.fetch(old)  # late: it does not turn LATEST back
        assert copies.log.head() == log.head() and copies.log.versions() == [0, 1]
        for version in (0, 1):
            assert contents(copies.log.folder(version)) == contents(log.folder(version))
            copies.log.verify(copies.log.manifest(version))
        (copies.log.root / "LATEST").unlink()  # as after a crash
        await copies.fetch(head_of(log))
        assert contents(copies.log.folder(1)) == contents(log.folder(1)) and copies.log.head() == log.head()

    async def test_a_copy_that_was_interrupted_goes_on_where_it_was(self, copies, ingest, log):
        ingest.fail_after = 3
        with pytest.raises(NotReady, match="died with this call"):
            await copies.fetch(head_of(log))
        assert copies.log.versions() == []
        ingest.fail_after = None
        await copies.fetch(head_of(log))
        assert contents(copies.log.folder(0)) == contents(log.folder(0))
        assert len(ingest.chunks) == len(set(ingest.chunks))

    async def test_a_version_damaged_at_the_ingest_is_never_accepted(self, copies, ingest, log):
        await copies.fetch(head_of(log))
        commit(log, 1)
        sound = contents(log.folder(1))
        flip_a_byte(log, 1, FIRST)
        with pytest.raises(LogCorrupt, match=FIRST):
            await copies.fetch(head_of(log))
        assert copies.log.versions() == [0]
        (log.folder(1) / "weights-00001.safetensors").write_bytes(sound["weights-00001.safetensors"])
        await copies.fetch(head_of(log))
        assert copies.log.versions() == [0, 1]

    async def test_a_manifest_with_another_digest_than_the_head_is_refused(self, copies, log):
        with pytest.raises(LogCorrupt, match="not 00ff"):
            await copies.fetch(head_of(log).model_copy(update={"digest": "00ff"}))
        assert copies.log.versions() == []

    async def test_a_version_that_is_gone_at_the_ingest_is_said_to_be_gone(self, copies, log):
        old = head_of(log)
        commit(log, 1)
        log.drop(0)
        with pytest.raises(NotFound, match="version 0 is not in the log"):
            await copies.fetch(old)

    async def test_a_full_disk_says_so_and_leaves_what_was_there(self, copies, log, monkeypatch):
        await copies.fetch(head_of(log))
        commit(log, 1)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module, "_append", full)
            with pytest.raises(InsufficientStorage, match="the copy of version 1 needs"):
                await copies.fetch(head_of(log))
        assert copies.log.versions() == [0]
        await copies.fetch(head_of(log))
        assert copies.log.head() == log.head()


class TestRestoredLog:
    async def test_a_copy_of_other_weights_is_replaced_even_while_it_is_read(self, node, ingest, copies, log):
        other = copies_on(node, ingest)
        with restored(log):
            commit(log, 1)
            await copies.fetch(head_of(log))
            await other.fetch(head_of(log))
        commit(log, 1, content=77)
        for replica in (other, copies):
            await replica.look()
            await replica.fetch(head_of(log))
            assert contents(replica.log.folder(1)) == contents(log.folder(1))
        assert copies.log.head() == log.head()

    async def test_copies_that_the_restored_log_does_not_have_are_removed(self, copies, log):
        with restored(log):
            for version in (1, 2):
                commit(log, version)
                await copies.fetch(head_of(log))
        copies.release(but=-1)
        await copies.look()
        await copies.fetch(head_of(log))
        assert copies.log.versions() == [0] and copies.log.head() == log.head()

    async def test_an_interrupted_copy_is_not_resumed_with_other_bytes(self, copies, ingest, log):
        with restored(log):
            commit(log, 1)
            ingest.fail_after = 3
            with pytest.raises(NotReady, match="died with this call"):
                await copies.fetch(head_of(log))
        ingest.fail_after = None
        commit(log, 1, content=77)
        await copies.fetch(head_of(log))
        assert contents(copies.log.folder(1)) == contents(log.folder(1))


class TestCancelledFetch:
    async def test_a_cancelled_fetch_writes_its_chunk_into_no_other_file(self, copies, log, monkeypatch, tmp_path):
        writing, go_on, append = threading.Event(), threading.Event(), module._append

        def held(fd: int, chunk: np.ndarray) -> None:
            writing.set()
            go_on.wait(30)
            append(fd, chunk)

        monkeypatch.setattr(module, "_append", held)
        fetching = asyncio.create_task(copies.fetch(head_of(log)))
        await asyncio.to_thread(writing.wait, 30)
        fetching.cancel()
        await settle()
        with untouched_files(tmp_path):
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await fetching
        monkeypatch.undo()
        await copies.fetch(head_of(log))
        assert contents(copies.log.folder(0)) == contents(log.folder(0))

    async def test_a_fetch_cancelled_while_it_waits_does_not_keep_the_lock(
        self, node, ingest, copies, log, monkeypatch
    ):
        waiting, go_on, acquire = threading.Event(), threading.Event(), WriterLock.acquire

        def held(lock: WriterLock, timeout_s: float) -> WriterLock:
            waiting.set()
            go_on.wait(30)
            return acquire(lock, timeout_s)

        with monkeypatch.context() as patch:
            patch.setattr(WriterLock, "acquire", held)
            fetching = asyncio.create_task(copies.fetch(head_of(log)))
            await asyncio.to_thread(waiting.wait, 30)
            fetching.cancel()
            await settle()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await fetching
        await asyncio.wait_for(copies_on(node, ingest).fetch(head_of(log)), 30)


class TestKeep:
    async def test_copies_that_no_replica_needs_are_removed(self, node, ingest, log):
        slow, fast = copies_on(node, ingest), copies_on(node, ingest)
        await slow.fetch(head_of(log))
        for version in (1, 2, 3, 4):
            commit(log, version)
            await fast.fetch(head_of(log))
            fast.release(but=version)
        assert fast.log.versions() == [0, 3, 4]
        slow.release(but=4)
        commit(log, 5)
        await fast.fetch(head_of(log))
        assert fast.log.versions() == [4, 5]

    async def test_a_damaged_copy_is_forgotten_and_fetched_anew(self, copies, ingest, log):
        old = head_of(log)
        await copies.fetch(old)
        commit(log, 1)
        await copies.fetch(head_of(log))
        flip_a_byte(copies.log, 1, FIRST)
        await copies.forget(1)
        assert copies.log.versions() == [0]
        now = copies.log.head()
        assert now is not None and (now.version, now.digest) == (0, old.digest)
        await copies.fetch(head_of(log))
        copies.log.verify(copies.log.manifest(1))
        await copies.forget(1)
        await copies.forget(0)
        assert copies.log.head() is None
        await copies.fetch(head_of(log))
        assert copies.log.head() == log.head()

    async def test_copies_of_an_old_log_are_removed_once_nobody_reads_them(
        self, node, ingest, copies, log, tmp_path, monkeypatch, caplog
    ):
        await copies.fetch(head_of(log))
        other = WeightLog(tmp_path / "other")
        commit(other, 0)
        other.sign()
        elsewhere = OfferingIngest(ChunkServer(other, CHUNK_BYTES))
        first = copies_on(node, elsewhere)
        assert {path.name for path in (node / "copies").iterdir()} == {copies.log.root.name, first.log.root.name}
        os.close(copies._fd)

        def failing(folder: Path) -> bool:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))

        with monkeypatch.context() as patch:
            patch.setattr(module, "is_unlocked", failing)
            copies_on(node, elsewhere)  # a copy that cannot be looked at stops no replica
            assert copies.log.root.exists() and f"{copies.log.root} is removed later" in caplog.text
        copies_on(node, elsewhere)
        assert [path.name for path in (node / "copies").iterdir()] == [first.log.root.name]


async def test_a_chunk_that_the_store_refused_is_put_again(ingest, monkeypatch):
    [file, *_] = ingest.served.files(0)

    def refuse(_: object) -> None:
        raise ObjectStoreFullError

    with monkeypatch.context() as patched:
        patched.setattr(module.ray, "put", refuse)
        with pytest.raises(ObjectStoreFullError):
            await ingest.served.chunk(0, file.name, 0)
    [ref] = await ingest.served.chunk(0, file.name, 0)
    assert len(ray.get(ref)) == min(file.nbytes, CHUNK_BYTES)


def test_a_version_that_is_dropped_meanwhile_is_not_found(ingest, log, monkeypatch):
    commit(log, 1)
    folder = log.folder

    def then_drop(version: int) -> Path:
        WeightLog(log.root).drop(version)
        return folder(version)

    monkeypatch.setattr(ingest.served._log, "folder", then_drop)
    with pytest.raises(NotFound, match="version 0 was removed while it was copied"):
        ingest.served.files(0)
