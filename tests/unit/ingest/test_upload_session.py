"""A version between begin and commit, with the executor held where a test needs it."""

import asyncio
import resource
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from rollout_service.config import QuantConfig, WeightsConfig
from rollout_service.errors import (
    InsufficientStorage,
    InvalidManifest,
    NotFound,
    RolloutServiceError,
)
from rollout_service.ingest import upload_session
from rollout_service.ingest.resources import Resources
from rollout_service.ingest.sources.folder import FolderSource
from rollout_service.ingest.sources.source import WeightSource
from rollout_service.ingest.upload_session import UploadSession, reading_order
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, PathSource, TrainerRecipe, UploadTensor
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.staged_file import StagingSpace
from tests.support.models import EMBEDDING, LM_HEAD
from tests.unit.ingest.trainer import (
    PART_BYTES,
    Weights,
    begin_of,
    folder_weights,
    open_files,
    parts_of,
    settle,
    stream_of,
)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(int).result()  # its thread is there before a test counts anything
        yield executor


@pytest.fixture
def gate(executor: ThreadPoolExecutor) -> Iterator[threading.Event]:
    """Until it is set, the executor runs nothing that a test submits."""
    gate = threading.Event()
    executor.submit(gate.wait)
    yield gate
    gate.set()


@pytest.fixture
def source(weights: Weights, tmp_path: Path) -> Path:
    """A trainer's folder with ``weights``."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def resources_of(
    model: Path, executor: ThreadPoolExecutor, part_bytes: int = PART_BYTES, of: type[Converter] = Converter
) -> Resources:
    served = ServedModel.load(model)
    recipe = TrainerRecipe(weights="fp8_block", quantized=tuple(served.plan(QuantConfig()).quantized))
    config = WeightsConfig(root=Path("not written"), part_bytes=part_bytes)
    resources = Resources(config, WeightLog(config.root), served, of(recipe))
    resources.executor = executor
    return resources


def staged_version(
    begin: BeginUpload, folder: Path, model: Path, executor: ThreadPoolExecutor, source: WeightSource | None = None
) -> UploadSession:
    return UploadSession(begin, folder, resources_of(model, executor), source)


async def accept(staged: UploadSession, part: int, data: bytes, uploader: str = "") -> None:
    """Receive a part as the listener does."""
    digest = xxhash.xxh3_128_hexdigest(data)
    incoming = await staged.begin_part(part, len(data), digest, uploader, lambda: None)
    if incoming is None:
        return
    try:
        incoming.open()
        if incoming.memory is not None:
            incoming.memory[:] = data
        incoming.write(0, memoryview(data))
        await staged.accept(incoming, digest, uploader)
    finally:
        incoming.close()
        staged.parts.end(incoming)


async def accept_all(staged: UploadSession, weights: Weights, uploader: str = "") -> None:
    for part, data in enumerate(parts_of(weights)):
        await accept(staged, part, data, uploader)


async def uploaded(
    weights: Weights, folder: Path, model: Path, executor: ThreadPoolExecutor
) -> tuple[StoredTensor, ...]:
    staged = staged_version(begin_of(1, weights), folder, model, executor)
    await accept_all(staged, weights)
    return await staged.finish()


def from_folder(source: Path, folder: Path, model: Path, executor: ThreadPoolExecutor) -> UploadSession:
    begin = BeginUpload(version=1, source=PathSource(path=source))
    return staged_version(begin, folder, model, executor, FolderSource(source))


async def test_a_tied_head_is_stored_as_the_embedding_and_may_not_differ(tied_model, tmp_path, executor):
    weights = folder_weights(tied_model)
    assert LM_HEAD not in weights
    stored = {t.name: t for t in await uploaded(weights, tmp_path / "1", tied_model, executor)}
    assert stored[LM_HEAD].digest == stored[EMBEDDING].digest
    assert stored[LM_HEAD].shape == tuple(weights[EMBEDDING].shape)
    weights[LM_HEAD] = weights[EMBEDDING] * 2
    with pytest.raises(InvalidManifest, match=f"{LM_HEAD} differs from {EMBEDDING}"):
        await uploaded(weights, tmp_path / "2", tied_model, executor)


class TestFailure:
    async def test_files_that_vanish_before_they_are_read_fail_the_version(
        self, model, source, tmp_path, executor, gate
    ):
        staged = from_folder(source, tmp_path / "1", model, executor)
        (source / "model.safetensors").unlink()
        gate.set()
        with pytest.raises(RolloutServiceError, match=r"version 1 could not be stored: .*model\.safetensors"):
            await staged.finish()
        assert staged.failure is not None
        await staged.discard()

    async def test_a_version_too_large_for_the_disk_leaves_nothing_behind(self, model, weights, tmp_path, executor):
        before = open_files()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(InsufficientStorage, match=r"version 1 .* needs \d+ bytes, and .* has \d+ free"):
                staged_version(begin_of(1, weights), tmp_path / "1", model, executor)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []
        assert open_files() == before

    def test_an_upload_of_millions_of_parts_is_refused_before_one_has_a_place(
        self, model, tmp_path, executor, monkeypatch
    ):
        ignored = UploadTensor(name="rotary_emb.inv_freq", dtype="float32", shape=(1 << 45,))
        monkeypatch.setattr(BeginUpload, "slots", None)
        with pytest.raises(InsufficientStorage):
            staged_version(BeginUpload(version=1, tensors=(ignored,)), tmp_path / "1", model, executor)


class HeldSource(FolderSource):
    """Reads tensors only when it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self.reading.set()
        assert self.go_on.wait(60)
        return super().read(names)


class TestDiscard:
    async def test_discarding_does_not_wait_for_queued_conversions(self, model, weights, tmp_path, executor, gate):
        staged = staged_version(begin_of(1, weights), tmp_path / "1", model, executor)
        await accept_all(staged, weights)
        await asyncio.wait_for(staged.discard(), 30)
        assert not gate.is_set() and list(tmp_path.iterdir()) == []

    async def test_discarding_waits_for_the_conversion_that_is_running(self, model, tmp_path, executor):
        source = HeldSource(model)
        begin = BeginUpload(version=1, source=PathSource(path=model))
        staged = staged_version(begin, tmp_path / "1", model, executor, source)
        await asyncio.to_thread(source.reading.wait, 60)
        discarding = asyncio.create_task(staged.discard())
        await settle()
        still_open = not discarding.done() and (tmp_path / "1").exists()
        source.go_on.set()
        await discarding
        assert still_open and staged.failure is None
        assert list(tmp_path.iterdir()) == []

    async def test_a_part_that_arrives_after_the_discard_is_told_so(self, model, weights, tmp_path, executor):
        staged = staged_version(begin_of(1, weights), tmp_path / "1", model, executor)
        incoming = staged.parts.begin(0, PART_BYTES, lambda: None)
        await staged.discard()
        with pytest.raises(FileNotFoundError):
            incoming.open()
        with pytest.raises(NotFound, match="version 1 was discarded before part 0 was complete"):
            await staged.accept(incoming, "digest")

    @pytest.mark.parametrize("is_mapped", [False, True], ids=["on a disk", "in memory"])
    async def test_a_late_part_is_not_written_into_the_next_upload(
        self, model, weights, tmp_path, memory, executor, is_mapped
    ):
        resources = resources_of(model, executor)
        if is_mapped:
            resources.space = StagingSpace(memory / "kept")
        folder = (memory if is_mapped else tmp_path) / "1"
        before = UploadSession(begin_of(1, weights), folder, resources)
        data = parts_of(weights)[0]
        late = await before.begin_part(0, len(data), "digest", "", lambda: None)
        await before.discard()
        staged = UploadSession(begin_of(1, weights), folder, resources)
        await accept(staged, 0, data)
        assert late is not None
        with pytest.raises(FileNotFoundError, match="its upload is over"):
            late.open()
        late.write(0, memoryview(bytes(len(data))))
        late.close()
        assert bytes(staged.parts.read(0, 0, len(data))) == data
        await staged.discard()
        resources.space.close()

    async def test_what_an_earlier_upload_left_in_the_folder_is_removed(self, model, weights, tmp_path, executor):
        for folder in (tmp_path / "1", tmp_path / "1.parts"):
            folder.mkdir()
            (folder / "part-000000").write_bytes(b"old")
        staged = staged_version(begin_of(1, weights), tmp_path / "1", model, executor)
        assert 0 in staged.parts.missing
        assert {path.name for path in (tmp_path / "1.parts").iterdir()} == {"upload.json", "staged"}
        assert {path.name for path in (tmp_path / "1").iterdir()} == {"weights-00001.safetensors"}
        await staged.discard()


class LateWriter(Converter):
    """What it reads first, it hands on only when it is let."""

    def __init__(self, recipe: TrainerRecipe) -> None:
        super().__init__(recipe)
        self.first_has_read, self.go_on = threading.Event(), threading.Event()
        self.order: list[str] = []

    def convert(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, to_cpu: bool = True, checks: DeferredChecks | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.order.append("reads")
        made = [(name, tensor.clone()) for name, tensor in super().convert(tensors, to_cpu=to_cpu, checks=checks)]
        if not self.first_has_read.is_set():
            self.first_has_read.set()
            assert self.go_on.wait(60)
        yield from made
        self.order.append("has written")


class TestSeveralThreads:
    async def test_several_threads_store_what_one_stores(self, weights, model, source, tmp_path, executor):
        by_one = await uploaded(weights, tmp_path / "1", model, executor)
        with ThreadPoolExecutor(4) as several:
            assert await uploaded(weights, tmp_path / "2", model, several) == by_one
            assert await from_folder(source, tmp_path / "3", model, several).finish() == by_one

    @pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves first"])
    async def test_a_replaced_part_is_stored_last(self, model, tmp_path, executor, leaves):
        weights = {name: tensor.clone() for name, tensor in folder_weights(model).items()}
        by_one = await uploaded(weights, tmp_path / "1", model, executor)
        stream = stream_of(weights)
        with ThreadPoolExecutor(4) as several:
            resources = resources_of(model, several, len(stream), LateWriter)
            converter = cast(LateWriter, resources.converter)
            staged = UploadSession(begin_of(1, weights), tmp_path / "2", resources)
            await accept(staged, 0, bytes(len(stream)))
            assert await asyncio.to_thread(converter.first_has_read.wait, 60)
            replacing = asyncio.create_task(accept(staged, 0, stream))
            await settle()
            if leaves:
                replacing.cancel()
                replacing = asyncio.create_task(accept(staged, 0, stream))
                await settle()
            assert staged.parts.missing == {0} and not replacing.done()
            converter.go_on.set()
            await replacing
            assert await staged.finish() == by_one
        assert converter.order == ["reads", "has written"] * 2

    async def test_a_sender_that_leaves_while_it_replaces_a_part_frees_its_place(
        self, weights, model, tmp_path, executor, monkeypatch
    ):
        staged = staged_version(begin_of(1, weights), tmp_path / "1", model, executor)
        monkeypatch.setattr(upload_session, "GRACE_S", 0.0)
        data, waiting = parts_of(weights)[0], asyncio.Event()
        await accept(staged, 0, bytes(len(data)))
        with monkeypatch.context() as patched:
            patched.setattr(staged._conversion, "forget", lambda keys: waiting.wait())
            leaving = asyncio.create_task(accept(staged, 0, data))
            await settle()
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        assert staged.parts.receiving(0) is None
        await accept(staged, 0, data)
        assert 0 not in staged.parts.missing

    async def test_a_part_sent_again_stops_the_sender_before(self, weights, model, tmp_path, executor, monkeypatch):
        staged = staged_version(begin_of(1, weights), tmp_path / "1", model, executor)
        monkeypatch.setattr(upload_session, "GRACE_S", 0.0)
        data, aborted = parts_of(weights)[0], asyncio.Event()
        stuck = staged.parts.begin(0, PART_BYTES, aborted.set)
        stuck.open()
        stuck.write(0, memoryview(bytes(10)))
        whole = asyncio.create_task(accept(staged, 0, data))
        await aborted.wait()
        assert 0 in staged.parts.missing
        stuck.close()
        staged.parts.end(stuck)
        await whole
        assert staged.parts.digests == {0: xxhash.xxh3_128_hexdigest(data)}
        assert bytes(staged.parts.read(0, 0, PART_BYTES)) == data
        await staged.discard()

    @pytest.mark.parametrize(("batches", "threads"), [(0, 4), (7, 1), (7, 3), (100, 8)])
    def test_threads_read_batches_that_are_far_apart(self, tmp_path, monkeypatch, batches, threads):
        order = order_of({f"{i:03}": 60 for i in range(batches)}, tmp_path, monkeypatch, threads)
        assert sorted(order) == list(range(batches))
        assert all(b - a >= batches // threads for a, b in pairwise(order[: min(threads, batches)]))

    def test_large_tensors_are_read_first(self, tmp_path, monkeypatch):
        order = order_of({"0": 60, "1": 60, "2": 300, "3": 60, "4": 400}, tmp_path, monkeypatch, 2)
        assert order[:2] == [4, 2] and sorted(order[2:]) == [0, 1, 3]


def order_of(sizes: dict[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> list[int]:
    """In which tensors of these sizes and numbers are read, each by itself."""
    monkeypatch.setattr(upload_session, "BATCH_BYTES", 100)
    save_file({name: torch.zeros(size, dtype=torch.int8) for name, size in sizes.items()}, folder / "0.safetensors")
    return [int(name) for [name] in reading_order(FolderSource(folder), threads)]
