"""Versions that a trainer publishes as changes to the one before, as slime and miles do."""

import asyncio
import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_service.config import ServiceConfig
from rollout_service.errors import (
    Forbidden,
    InvalidDelta,
    InvalidManifest,
    InvalidRequest,
    LogLocked,
    NotFound,
    NotReady,
    RolloutServiceError,
    VersionConflict,
)
from rollout_service.ingest import stores, trainer_weights
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources.delta_folder import DeltaFolder, is_filled
from rollout_service.ingest.sources.folder import Header
from rollout_service.ingest.trainer_weights import TrainerWeights
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.ignored import NOTHING_IGNORED
from rollout_service.protocol.upload import BeginUpload, CommitUpload, PathSource, PullWeights, RollBack
from rollout_service.protocol.weights import WeightStatus
from tests.support.checkpoints import save_checkpoint
from tests.support.delta_writer import CHECKSUMS, publish, raw, stepped
from tests.unit.ingest import expected
from tests.unit.ingest.faults import fail, of
from tests.unit.ingest.trainer import Weights, changed, config_of, replica, started


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the trainer publishes."""
    (tmp_path / "published").mkdir()
    return tmp_path / "published"


@pytest.fixture
def config(model: Path, tmp_path: Path, store: Path) -> ServiceConfig:
    return config_of(model, tmp_path / "log", weights={"source_roots": [store]}).resolved()


@pytest.fixture
def steps(weights: Weights) -> list[Weights]:
    """The weights of versions 0 to 5."""
    found = [weights]
    for number in range(1, 6):
        found.append(stepped(found[-1], number))
    return found


async def pull(ingest: Ingest, store: Path, version: int, **options: Any) -> int:
    request = PullWeights(source_dir=str(store), target_version=version, wait="none", **options)
    return (await ingest.pull_weights(request)).version


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves files, and ranges of them."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if "Range" not in self.headers or not path.is_file():
            return super().do_GET()
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = path.read_bytes()[start : end + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(store: Path) -> Iterator[str]:
    """A web server with the trainer's folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(RangeHandler, directory=str(store.parent)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{store.name}"
    server.shutdown()
    thread.join()
    server.server_close()


async def served(ingest: Ingest, version: int) -> None:
    """Return once ``version`` is the newest."""
    while (await ingest.fleet()).latest_version < version:
        await asyncio.sleep(0.01)


async def require(ingest: Ingest, version: int, weights: Weights, model: Path) -> None:
    """Compare a version with the same weights, sent whole."""
    assert (await ingest.status(version)).digest == expected.digest(weights, ServedModel.load(model).fingerprint)


@pytest.mark.parametrize(("encoding", "checksum"), [("xor", "xxh3-128"), ("overwrite", "blake3"), ("xor", "adler32")])
async def test_a_chain_of_deltas_equals_whole_versions(ingest, tmp_path, store, steps, model, encoding, checksum):
    for version in range(1, 4):
        publish(store, version, steps[version - 1], steps[version], encoding=encoding, checksum=checksum, files=version)
        assert await pull(ingest, store, version) == version
        await require(ingest, version, steps[version], model)
    await ingest.pulls.settled()
    kept = [path.name for path in (tmp_path / "log" / "trainer").rglob("*") if path.is_file()]
    assert sorted(kept) == ["OWNER", "STATE", "config.json", "model.safetensors"]  # the weights are kept once


async def test_twenty_steps_have_a_whole_push_s_digests(ingest, store, weights, model):
    assert await pull(ingest, store, 0, local_checkpoint_dir="/nvme/checkpoint") == 0
    old = weights
    for version in range(1, 21):
        new = stepped(old, version)
        publish(store, version, old, new)
        await pull(ingest, store, version, local_checkpoint_dir="/nvme/checkpoint")
        assert (await ingest.status(version)).state == "staged"
        status = await ingest.push_folder(Path("/nvme/checkpoint"), CommitUpload(), version)
        assert status.version == version
        await require(ingest, version, new, model)
        old = new


async def test_more_links_than_allowed_are_refused(ingest, store, steps, monkeypatch):
    monkeypatch.setattr(trainer_weights, "MAX_LINKS", 2)
    for version in range(1, 4):
        publish(store, version, steps[version - 1], steps[version])
    with pytest.raises(InvalidDelta, match=r"version 3 in .* needs more than 2 deltas: publish a whole folder"):
        await pull(ingest, store, 3)
    assert await pull(ingest, store, 2) == 2
    assert await pull(ingest, store, 3) == 3


@pytest.mark.parametrize("is_pulled", [True, False])
async def test_a_whole_folder_begins_a_new_chain_pulled_or_on_the_way(ingest, store, steps, model, is_pulled):
    save_checkpoint(store / "weight_v000003", steps[3])
    publish(store, 4, steps[3], steps[4])
    if is_pulled:
        assert await pull(ingest, store, 3) == 3
        shutil.rmtree(store / "weight_v000003")  # it is kept
    assert await pull(ingest, store, 4) == 4
    await require(ingest, 4, steps[4], model)


async def test_a_whole_folder_with_checksums_is_checked(ingest, store, steps, model):
    """ModelExpress writes checksums of whole tensors, too."""
    folder = save_checkpoint(store / "weight_v000001", steps[1])
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for checksum, error in (("md5", "md5"), ("adler32", "has the checksum .* and not None")):
        index["metadata"]["checksum_format"] = checksum
        path.write_text(json.dumps(index))
        with pytest.raises(InvalidManifest, match=error):
            await pull(ingest, store, 1)
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        save_file(held, file, metadata={name: CHECKSUMS["adler32"](raw(tensor)) for name, tensor in held.items()})
    assert await pull(ingest, store, 1) == 1
    publish(store, 2, steps[1], steps[2])
    assert await pull(ingest, store, 2) == 2
    await require(ingest, 2, steps[2], model)


@pytest.mark.parametrize("below", [".", "link"])
async def test_push_path_takes_a_folder_of_changes(ingest, store, steps, model, below):
    (store / "link").symlink_to(store)
    for version in (1, 2):
        folder = publish(store, version, steps[version - 1], steps[version])
        begin = BeginUpload(version=version, source=PathSource(path=store / below / folder.name))
        await ingest.begin(begin)
        staged = ingest.staged(version)
        await ingest.begin(begin)
        assert ingest.staged(version) is staged  # it is not read again
        await ingest.commit(version, CommitUpload())
        assert (await ingest.begin(begin)).state == "committed"
        shutil.rmtree(folder)
        await require(ingest, version, steps[version], model)


async def test_a_repeated_pull_applies_nothing_twice(ingest, store, steps, model):
    for version in (1, 2):
        publish(store, version, steps[version - 1], steps[version])
        assert await asyncio.gather(*(pull(ingest, store, version) for _ in range(3))) == [version] * 3
    await require(ingest, 2, steps[2], model)
    assert [status.version for status in await ingest.versions()] == [1, 2]


async def test_a_base_that_is_not_kept_fails_no_later_pull(ingest, store, steps, model, monkeypatch, caplog):
    def fail_unexpectedly(_: Path) -> None:
        raise ZeroDivisionError

    publish(store, 1, steps[0], steps[1])
    with monkeypatch.context() as patch:
        patch.setattr(ingest.pulls.weights, "settle", fail_unexpectedly)
        assert await pull(ingest, store, 1) == 1
        await ingest.pulls.settled()
    assert "are not kept for the next delta" in caplog.text and "ZeroDivisionError" in caplog.text
    publish(store, 2, steps[1], steps[2])
    assert await pull(ingest, store, 2) == 2
    await require(ingest, 2, steps[2], model)


async def test_a_delta_rewritten_under_its_number_is_read_anew(ingest, store, steps, model):
    for version in (1, 2):
        publish(store, version, steps[version - 1], steps[version])
        await pull(ingest, store, version)
    shutil.rmtree(store / "weight_v000002")
    publish(store, 2, steps[1], steps[3])
    assert await pull(ingest, store, 2) == 3
    await require(ingest, 3, steps[3], model)
    shutil.rmtree(store / "weight_v000001")
    shutil.rmtree(store / "weight_v000002")
    publish(store, 2, steps[1], steps[4])
    with pytest.raises(InvalidDelta, match="needs version 1, which is neither kept"):
        await pull(ingest, store, 2)


async def test_another_run_begins_with_the_served_model(ingest, store, steps, model):
    publish(store, 1, steps[0], steps[1])
    await pull(ingest, store, 1)
    shutil.rmtree(store / "weight_v000001")
    assert await pull(ingest, store, 0) == 2
    await require(ingest, 2, steps[0], model)
    publish(store, 1, steps[0], steps[2])
    assert await pull(ingest, store, 1) == 3
    await require(ingest, 3, steps[2], model)


async def test_a_version_goes_on_after_a_restart_and_a_plain_push(ingest, restarted, store, steps, model, weights):
    publish(store, 1, steps[0], steps[1])
    await pull(ingest, store, 1)
    shutil.rmtree(store / "weight_v000001")
    publish(store, 2, steps[1], steps[2])
    await pull(ingest, store, 2, local_checkpoint_dir="/nvme/checkpoint")
    again = await restarted()
    assert (await again.push_folder(Path("/nvme/checkpoint"), CommitUpload(), 2)).version == 2
    await require(again, 2, steps[2], model)
    # a push by another way moves the numbers on, and not what the trainer's changes are of
    save_checkpoint(store / "other", changed(weights, 1.0))
    assert (await again.push_folder(store / "other", CommitUpload(), None)).version == 3
    publish(store, 3, steps[2], steps[3])
    assert await pull(again, store, 3) == 4
    await require(again, 4, steps[3], model)


async def test_a_missing_link_is_refused_by_name(ingest, store, steps):
    index = publish(store, 3, steps[2], steps[3]) / "model.safetensors.index.json"
    text = index.read_text()
    for base in ("000002", "weight_v000002", "step-20"):
        index.write_text(text.replace('"000002"', f'"{base}"'))
        complaint = rf"version 3 in .* needs version {base.lstrip('0')}, which is neither kept \(none is kept\)"
        with pytest.raises(InvalidDelta, match=complaint):
            await pull(ingest, store, 3)
    assert (await ingest.fleet()).latest_version == 0


async def test_a_delta_that_cannot_be_read_is_refused_by_name(ingest, store, steps):
    for metadata, error in (
        ({"delta_encoding": "sparse"}, "delta_encoding 'sparse': the service reads xor, overwrite"),
        ({"compression_format": "lz4"}, "compression_format 'lz4': the service reads zstd"),
        ({"checksum_format": "md5"}, "checksum_format 'md5': the service reads xxh3-128, blake3, adler32"),
        ({"base_version": None}, r"no metadata\.base_version"),
        ({"base_version": "000002"}, "is version 1, and cannot be a delta of version 2"),
    ):
        shutil.rmtree(store / "weight_v000001", ignore_errors=True)
        publish(store, 1, steps[0], steps[1], **metadata)
        with pytest.raises((InvalidManifest, InvalidDelta), match=error):
            await pull(ingest, store, 1)
    shutil.rmtree(store / "weight_v000001")
    more = {**steps[0], "model.more": torch.zeros(8)}
    publish(store, 1, more, {**more, "model.more": torch.ones(8)})
    with pytest.raises(InvalidDelta, match=r"version 1 in .* changes model\.more, which its base does not have"):
        await pull(ingest, store, 1)
    path = store / "weight_v000001" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lost"] = "model-00000-of-00001.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InvalidManifest, match="names lost, which no file holds"):
        await pull(ingest, store, 1)
    assert (await ingest.fleet()).latest_version == 0


async def test_changes_of_other_weights_leave_the_version_before(ingest, store, steps, model):
    publish(store, 1, steps[0], steps[1])
    await pull(ingest, store, 1)
    wrong = publish(store, 2, steps[0], steps[2])
    for options in ({}, {"local_checkpoint_dir": "/nvme/checkpoint"}):
        with pytest.raises(InvalidDelta, match=r"version 2 in .*, a delta of version 1: .* has the checksum"):
            await pull(ingest, store, 2, **options)
    with pytest.raises(RolloutServiceError):
        await ingest.push_folder(Path("/nvme/checkpoint"), CommitUpload(), 2)
    assert (await ingest.fleet()).latest_version == 1
    shutil.rmtree(wrong)
    publish(store, 2, steps[1], steps[2])
    assert await pull(ingest, store, 2) == 2
    await require(ingest, 2, steps[2], model)


def test_the_wrong_length_of_changes_is_refused(tmp_path):
    old, new = {"a": torch.zeros(1000)}, {"a": torch.ones(1000)}
    for encoding in ("xor", "overwrite"):
        delta = DeltaFolder(publish(tmp_path / encoding, 1, old, new, encoding=encoding))
        with pytest.raises(InvalidDelta, match=r"version 1 in .* a: "):
            delta.apply("a", memoryview(bytearray(100)), is_filled)
        whole = memoryview(bytearray(4000))
        delta.apply("a", whole, is_filled)
        assert whole == new["a"].numpy().tobytes()
    with pytest.raises(InvalidDelta, match="4000 bytes of changes for the tensor's 8000"):
        DeltaFolder(tmp_path / "xor" / "weight_v000001").apply("a", memoryview(bytearray(8000)), is_filled)


def test_pulls_read_into_the_same_memory(tmp_path, store, model, steps):
    """Allocating and registering it anew would take longer than reading."""
    registered: list[memoryview] = []

    def register(memory: memoryview) -> Callable[[], None]:
        registered.append(memory)
        return lambda: None

    weights = TrainerWeights(tmp_path / "kept", model, (store,), (), NOTHING_IGNORED, register)
    for version in (1, 2):
        folder = publish(store, version, steps[version - 1], steps[version])
        source = weights.source_of(folder, keep=True)
        names = [tensor.name for tensor in source.table]
        assert all(torch.equal(tensor, steps[version][name]) for name, tensor in source.read(names))
        weights.settle(folder)
    assert len(registered) == 1


def test_a_kept_file_that_is_cut_while_it_is_read_is_refused(tmp_path, store, model, steps, monkeypatch):
    """Its unchanged tensors have no checksum, so they would become garbage."""
    folder, real = publish(store, 1, steps[0], steps[1]), Header.of

    def cut(path: Path) -> Header:
        header = real(path)
        os.truncate(path, path.stat().st_size - 1)
        return header

    weights = TrainerWeights(tmp_path / "kept", model, (store,), (), NOTHING_IGNORED, lambda _: lambda: None)
    weights.source_of(folder, keep=True)
    weights.settle(folder)
    folder = publish(store, 2, steps[1], steps[2])
    weights.source_of(folder, keep=True)
    monkeypatch.setattr(Header, "of", cut)
    with pytest.raises(InvalidManifest, match="has become shorter; pull a whole folder"):
        weights.settle(folder)


async def test_nothing_outside_the_roots_is_read(ingest, tmp_path, store, steps):
    publish(tmp_path / "elsewhere", 1, steps[0], steps[1])
    with pytest.raises(Forbidden, match="source_roots"):
        await pull(ingest, tmp_path / "elsewhere", 1)
    with pytest.raises(NotFound, match="version 1 is not published"):
        await pull(ingest, store, 1)
    file = publish(store, 1, steps[0], steps[1]) / "model-00000-of-00001.safetensors"
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(Forbidden, match="source_roots"):
        await pull(ingest, store, 1)


@pytest.mark.parametrize("moved", [0, 1, 2])
async def test_an_interrupted_change_of_the_files_is_finished_once(
    ingest, config, store, steps, model, monkeypatch, moved
):
    """The process ends after some of the two files have moved to the next generation."""
    save_checkpoint(store / "weight_v000001", steps[1])
    await pull(ingest, store, 1)
    replaced, real = [], os.replace

    def replace(source: Any, target: Any) -> None:
        if str(target).endswith(".safetensors"):
            if len(replaced) == moved:
                raise KeyboardInterrupt
            replaced.append(target)
        real(source, target)

    publish(store, 2, steps[1], steps[2])
    monkeypatch.setattr(trainer_weights.os, "replace", replace)
    weights = ingest._uploads.trainer_weights
    weights.source_of(store / "weight_v000002")
    if moved < 2:
        with pytest.raises(KeyboardInterrupt):
            weights.settle(store / "weight_v000002")
    else:
        weights.settle(store / "weight_v000002")
    monkeypatch.undo()
    await ingest.stop()
    async with started(config) as again:
        assert await pull(again, store, 2) == 2
        await require(again, 2, steps[2], model)
        publish(store, 3, steps[2], steps[3])
        assert await pull(again, store, 3) == 3
        await require(again, 3, steps[3], model)


@pytest.mark.parametrize("ends", [False, True])
async def test_the_reply_does_not_wait_for_the_base(ingest, config, store, steps, model, monkeypatch, ends):
    """The trainer deletes the folder after the reply; the process may end before the next delta's base is there."""
    weights, may_settle = ingest.pulls.weights, Event()
    for version in (1, 2):
        publish(store, version, steps[version - 1], steps[version])
    await pull(ingest, store, 1)
    real = weights.settle

    def settle(folder: Path) -> None:
        may_settle.wait()
        if not ends:
            real(folder)

    monkeypatch.setattr(weights, "settle", settle)
    assert await pull(ingest, store, 2) == 2
    for version in (1, 2):
        shutil.rmtree(store / f"weight_v{version:06d}")
    publish(store, 3, steps[2], steps[3])
    may_settle.set()
    if ends:
        await ingest.stop()
        ingest = Ingest(config)
        await ingest.start()
    try:
        assert await pull(ingest, store, 3) == 3
        await require(ingest, 3, steps[3], model)
    finally:
        await ingest.stop()


async def test_a_pull_repeated_after_a_restart_keeps_the_base(ingest, restarted, store, steps, model, monkeypatch):
    """The process ends between the commit and the note that the base is to be changed."""
    publish(store, 1, steps[0], steps[1])
    await pull(ingest, store, 1)
    await ingest.pulls.settled()
    for name in ("copy_changes", "settle"):
        monkeypatch.setattr(ingest.pulls.weights, name, lambda _: True)
    publish(store, 2, steps[1], steps[2])
    await pull(ingest, store, 2)
    again = await restarted()
    assert await pull(again, store, 2) == 2
    for version in (1, 2):
        shutil.rmtree(store / f"weight_v{version:06d}")
    publish(store, 3, steps[2], steps[3])
    assert await pull(again, store, 3) == 3
    await require(again, 3, steps[3], model)


@pytest.mark.parametrize("root", ["log", "checkpoints"])
async def test_what_others_have_in_trainer_root_is_not_removed(model, config, tmp_path, store, steps, root):
    shutil.copytree(model, tmp_path / "checkpoints" / "100")
    publish(store, 1, steps[0], steps[1])
    weights = config.weights.model_copy(update={"trainer_root": tmp_path / root})
    async with started(config.model_copy(update={"weights": weights})) as ingest:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=rf"weights.trainer_root=.*/{root} holds \d+, which"):
                await pull(ingest, store, 1)
    assert (tmp_path / "log" / "0").is_dir() and (tmp_path / "checkpoints" / "100" / "config.json").is_file()


async def test_a_folder_whose_name_has_a_url_in_it_is_a_folder(ingest, store, steps, model):
    odd = store / "s3:" / "run"
    publish(odd, 1, steps[0], steps[1])
    request = PullWeights(source_dir=f"{store}/s3://run", target_version=1, wait="none")
    assert (await ingest.pull_weights(request)).version == 1
    await require(ingest, 1, steps[1], model)


async def test_numbered_folders_of_safetensors_alone_are_not_removed(model, config, tmp_path, store, steps):
    shutil.copytree(model, tmp_path / "checkpoints" / "100", ignore=lambda _, names: {*names} - {"model.safetensors"})
    publish(store, 1, steps[0], steps[1])
    weights = config.weights.model_copy(update={"trainer_root": tmp_path / "checkpoints"})
    async with started(config.model_copy(update={"weights": weights})) as ingest:
        with pytest.raises(InvalidRequest, match=r"checkpoints holds 100, which the service has not made"):
            await pull(ingest, store, 1)
    assert [path.name for path in (tmp_path / "checkpoints" / "100").iterdir()] == ["model.safetensors"]


async def test_two_services_do_not_use_one_trainer_root(ingest, model, config, tmp_path, store, steps):
    publish(store, 1, steps[0], steps[1])
    weights = config.weights.model_copy(update={"trainer_root": tmp_path / "trainer"})
    first = config.model_copy(update={"weights": weights.model_copy(update={"root": tmp_path / "first"})})
    second = config.model_copy(update={"weights": weights.model_copy(update={"root": tmp_path / "second"})})
    async with started(second) as other:
        async with started(first) as one:
            assert await pull(one, store, 1) == 1
            with pytest.raises(LogLocked, match=r"trainer is being written by .*name another weights\.trainer_root"):
                await pull(other, store, 1)
        assert await pull(other, store, 1) == 1
        await require(other, 1, steps[1], model)


async def test_a_read_that_outlasts_its_ingest_keeps_the_folder(config, store, url, steps, monkeypatch):
    save_checkpoint(store / "weight_v000001", steps[1])
    reading, go_on = Event(), Event()
    read_all = stores._read_all

    def slow(*args: Any) -> None:
        if not reading.is_set():
            reading.set()
            go_on.wait()
        read_all(*args)

    monkeypatch.setattr(stores, "_read_all", slow)
    remote = config.model_copy(update={"weights": config.weights.model_copy(update={"source_urls": (url,)})})
    async with started(remote) as one:
        pulling = asyncio.create_task(pull_url(one, url, 1))
        await asyncio.to_thread(reading.wait)
        await one.stop()
        try:
            async with started(remote) as other:
                with pytest.raises(LogLocked, match="trainer is being written by"):
                    await pull_url(other, url, 1)
        finally:
            go_on.set()
        with pytest.raises(NotReady, match="this process is ending"):
            await pulling


async def test_kept_weights_that_cannot_be_read_just_now_are_not_lost(
    ingest, config, tmp_path, store, steps, model, monkeypatch
):
    publish(store, 1, steps[0], steps[1])
    await pull(ingest, store, 1)
    await ingest.pulls.settled()
    await ingest.stop()
    shutil.rmtree(store / "weight_v000001")
    publish(store, 2, steps[1], steps[2])
    state = tmp_path / "log" / "trainer" / "STATE"
    async with started(config) as again:
        with monkeypatch.context() as disk:
            fail(disk, Path, "read_bytes", errno.EIO, of(state))
            with pytest.raises(NotReady, match=r"the weights in .* cannot be read: .*; send the call again"):
                await pull(again, store, 2)
        assert await pull(again, store, 2) == 2
        await require(again, 2, steps[2], model)
        await again.pulls.settled()
    state.write_text(state.read_text().replace('"boot":"', '"boot":"another-'))  # lost with the host's memory
    publish(store, 3, steps[2], steps[3])
    async with started(config) as again:
        with pytest.raises(InvalidDelta, match=r"needs version 1, which is neither kept \(none is kept\)"):
            await pull(again, store, 3)
        publish(store, 1, steps[0], steps[1])
        assert await pull(again, store, 3) == 3
        await require(again, 3, steps[3], model)


async def test_a_pull_is_not_taken_for_an_upload_that_replaced_it(ingest, trainer, store, steps, monkeypatch):
    publish(store, 1, steps[0], steps[1])
    commit = ingest.commit

    async def replaced(version: int, request: CommitUpload) -> WeightStatus:
        await trainer.upload(version, steps[2])
        return await commit(version, request)

    monkeypatch.setattr(ingest, "commit", replaced)
    with pytest.raises(VersionConflict, match=r"announced again since: .* nothing was committed"):
        await pull(ingest, store, 1)
    assert (await ingest.status(1)).state == "staged"


async def test_a_pull_whose_version_is_removed_while_it_waits_is_answered(ingest, trainer, store, steps):
    await ingest.report(replica("a", 0))
    publish(store, 1, steps[0], steps[1])
    pulling = asyncio.create_task(ingest.pull_weights(PullWeights(source_dir=str(store), target_version=1)))
    await served(ingest, 1)
    for version in (2, 3):
        newest = await trainer.push(version, steps[version])
    assert [status.version for status in await ingest.versions()] == [0, 2, 3]
    await ingest.report(replica("a", 3, 1, digest=newest.digest))
    status = await pulling
    assert (status.version, status.state) == (1, "live")


@pytest.mark.parametrize("how", ["a folder", "a URL"])
async def test_a_watched_store_is_followed(config, store, steps, model, how, url):
    """The follower serves what another service was told of, with the same digests; damage leaves the version before."""
    watch = str(store) if how == "a folder" else url
    weights = config.weights.model_copy(update={"watch": watch, "source_urls": (url,), "poll_s": 0.02})
    publish(store, 1, steps[0], steps[1])
    async with started(config.model_copy(update={"weights": weights})) as follower:
        await served(follower, 1)
        wrong = publish(store, 2, steps[2], steps[3])
        while follower.watcher.problem is None:
            await asyncio.sleep(0.01)
        assert "has the checksum" in str(follower.watcher.problem)
        shutil.rmtree(wrong)
        save_checkpoint(store / "weight_v000003", steps[3])
        await served(follower, 3)
        publish(store, 4, steps[3], steps[4])
        await served(follower, 4)
        await require(follower, 4, steps[4], model)


async def looked_twice(follower: Ingest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the follower; return when it has looked for the second time, and so has served what it found first."""
    newest, looks = follower.pulls.weights.newest, Counter[str]()

    def count(store: str) -> int | None:
        looks[store] += 1
        return newest(store)

    monkeypatch.setattr(follower.pulls.weights, "newest", count)
    await follower.start()
    while looks.total() < 2:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["a folder", "a URL"])
async def test_a_restart_keeps_a_follower_s_rollback(config, store, steps, model, how, url, monkeypatch):
    watch = str(store) if how == "a folder" else url
    weights = config.weights.model_copy(update={"watch": watch, "source_urls": (url,), "poll_s": 0.02})
    following = config.model_copy(update={"weights": weights})
    publish(store, 1, steps[0], steps[1])
    async with started(following) as follower:
        await served(follower, 1)
        publish(store, 2, steps[1], steps[2])
        await served(follower, 2)
        assert (await follower.roll_back(RollBack(to=1))).version == 3
    follower = Ingest(following)
    try:
        await looked_twice(follower, monkeypatch)
        assert (await follower.fleet()).latest_version == 3
        publish(store, 3, steps[2], steps[3])
        await served(follower, 4)
        await require(follower, 4, steps[3], model)
    finally:
        await follower.stop()


@pytest.fixture
async def remote(config: ServiceConfig, url: str) -> AsyncIterator[Ingest]:
    """An ingest that may read the web server, but not the folder."""
    weights = config.weights.model_copy(update={"source_roots": (), "source_urls": (url,)})
    async with started(config.model_copy(update={"weights": weights})) as ingest:
        yield ingest


async def pull_url(ingest: Ingest, url: str, version: int) -> int:
    return (await ingest.pull_weights(PullWeights(uri=url, target_version=version, wait="none"))).version


async def test_versions_come_from_a_url_in_ranges(remote, url, store, steps, model, monkeypatch):
    monkeypatch.setattr(stores, "_RANGE_BYTES", 10_000)
    save_checkpoint(store / "weight_v000001", steps[1])
    publish(store, 2, steps[1], steps[2])
    publish(store, 3, steps[2], steps[3])
    publish(store, 4, steps[3], steps[3])
    assert await pull_url(remote, url, 1) == 1
    await require(remote, 1, steps[1], model)
    assert await pull_url(remote, url, 3) == 3
    await require(remote, 3, steps[3], model)
    assert await pull_url(remote, url, 4) == 4
    assert await pull_url(remote, url, 4) == 4
    await require(remote, 4, steps[3], model)
    shutil.rmtree(store / "weight_v000004")
    folder = publish(store, 4, steps[3], steps[5])
    os.utime(folder / "model-00000-of-00001.safetensors", (0, 0))
    assert await pull_url(remote, url, 4) == 5  # rewritten under its number
    await require(remote, 5, steps[5], model)


async def test_a_damaged_transfer_leaves_the_version_before(remote, url, store, steps, model):
    folder = publish(store, 1, steps[0], steps[1])
    file = folder / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    good = file.read_bytes()
    file.write_bytes(data)
    with pytest.raises(InvalidDelta, match="version 1 in"):
        await pull_url(remote, url, 1)
    assert (await remote.fleet()).latest_version == 0
    file.write_bytes(good)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("zstd", "lz4"))
    with pytest.raises(InvalidManifest, match="compression_format 'lz4'"):
        await pull_url(remote, url, 1)
    index.write_text(text)
    assert await pull_url(remote, url, 1) == 1
    await require(remote, 1, steps[1], model)


async def test_a_url_elsewhere_or_not_reached_is_refused(remote, url):
    for elsewhere in ("http://127.0.0.1:1/elsewhere", f"{url}-other", f"{url}/../secret", f"{url}/%2e%2E/secret"):
        with pytest.raises(Forbidden, match=r"is not below weights\.source_urls"):
            await pull_url(remote, elsewhere, 1)
    with pytest.raises(NotFound, match="version 7 is not published"):
        await pull_url(remote, url, 7)
    weights = stores.Stores(Path("/nowhere"), ("http://127.0.0.1:1", "unknown://"))
    with pytest.raises(NotReady, match="cannot be reached"):
        await asyncio.to_thread(weights.newest, "http://127.0.0.1:1/run")
    with pytest.raises(InvalidRequest, match="install the package for its scheme"):
        weights.newest("unknown://bucket/run")


def test_an_older_version_without_an_answer_hides_no_newer_one(store, steps, monkeypatch):
    for number in (1, 2):
        publish(store, number, steps[number - 1], steps[number])
    unreadable = "weight_v000001"
    fail(monkeypatch, os, "stat", errno.ESTALE, lambda path: unreadable in str(path))
    follower = stores.Stores(Path("/nowhere"), ())
    assert follower.newest(str(store)) == 2
    unreadable = "weight_v000002"
    with pytest.raises(OSError, match="Stale file handle"):  # and not the older one, which would go back
        follower.newest(str(store))


async def test_a_follower_that_ends_fails_the_health_check(config, store, monkeypatch):
    def newest(_: str) -> int:
        raise ZeroDivisionError

    weights = config.weights.model_copy(update={"watch": str(store)})
    follower = Ingest(config.model_copy(update={"weights": weights}))
    monkeypatch.setattr(follower.pulls.weights, "newest", newest)
    await follower.start()
    try:
        while True:
            try:
                follower.check_tasks()
            except RolloutServiceError as error:
                assert str(error) == f"weights.watch={store} has stopped: its task ended; restart this process"
                break
            await asyncio.sleep(0.01)
    finally:
        await follower.stop()
