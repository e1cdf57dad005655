"""Versions through memory that trainer and ingest share, into the real ingest behind its real gateway."""

import asyncio
import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
import torch

from rollout_service.client import RolloutClient, _shared_memory
from rollout_service.client._tensors import TensorSource, describe
from rollout_service.errors import InvalidRequest, NotFound, NotShared, QuantizationError, UploadIncomplete
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.sources.shared_memory import TrainerMemory
from rollout_service.kv_scales.scales import KVScales, LayerScales
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, CommitUpload, SharedMemorySource, SharedTensors
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.runtime.shared_memory import SharedMemory
from tests.unit.client.conftest import cancelled, with_nan
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.ingest.trainer import Weights, begin_of, changed, config_of, started, stream_of


@pytest.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[RealIngest]:
    async with real_ingest(model, tmp_path / "log") as running:
        yield running


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_memory, "BATCH_BYTES", 100_000)


@pytest.fixture
def worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_memory, "MIN_SHARED_BYTES", 0)


async def how_it_came(service: RealIngest, version: int) -> str:
    record = await service.ingest.committed(version)
    assert record is not None
    return "parts" if record.begin.source is None else type(record.begin.source).__name__


@pytest.mark.usefixtures("small_batches")
class TestPush:
    @pytest.mark.parametrize("quantize", ["service", "trainer"])
    async def test_the_version_is_the_one_that_parts_make(self, service, client, weights, quantize):
        in_parts = await client.push_weights(1, dict(weights), transport="http", wait="none")
        shared = await client.push_weights(2, dict(weights), transport="shared_memory", quantize=quantize, wait="none")
        assert shared.digest == in_parts.digest
        assert await how_it_came(service, 2) == "SharedMemorySource"
        service.log.verify(service.log.manifest(2))
        assert shared.timings is not None and min(shared.timings.model_dump().values()) > 0
        assert (await service.ingest.status(1)).timings == in_parts.timings != shared.timings

    async def test_each_push_may_be_of_another_client(self, service, weights):
        for version in range(1, 19):
            async with RolloutClient(service.url) as client:
                await client.push_weights(version, dict(weights), transport="shared_memory", wait="none")
            assert await how_it_came(service, version) == "SharedMemorySource"

    async def test_kv_scales_are_stored_as_with_parts(self, service, client, weights, model):
        layers = ServedModel.load(model).attention
        scales = KVScales(layers={name: LayerScales(q=0.5, k=0.25, v=2.0) for name in layers})
        digests = set()
        for transport in ("http", "shared_memory", "delta"):
            status = await client.push_weights(
                "next", dict(weights), kv_scales=scales, transport=transport, wait="none"
            )
            digests.add(status.digest)
            assert status.kv_scales_from == "trainer"
            assert service.log.manifest(status.version).kv_scales == scales.named()
        assert len(digests) == 1

    async def test_beside_a_tensor_larger_than_four_batches_there_is_room_for_two(
        self, service, client, weights, monkeypatch
    ):
        monkeypatch.setattr(_shared_memory, "BATCH_BYTES", 3000)
        in_parts = await client.push_weights(1, dict(weights), transport="http", wait="none")
        memories, seen = set(), list[tuple[int, int]]()
        for version in (2, 3):
            seen.clear()
            shared = await client.push_weights(
                version, dict(weights), transport="shared_memory", wait="none", progress=lambda *at: seen.append(at)
            )
            assert shared.digest == in_parts.digest
            memories.add(memory := client._uploader._shared["shared_memory"]._memory)
            nbytes = len(stream_of(weights))
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)
            assert len(seen) > 3 and seen[-1] == (nbytes, nbytes)
        largest = max(tensor.nbytes for tensor in weights.values())
        assert memory.nbytes >= largest + 2 * 3000 > 6 * 3000 and len(memories) == 1, "it is kept for the next push"

    async def test_a_generator_and_tensors_of_any_layout_are_copied(self, client, weights):
        whole = await client.push_weights(1, dict(weights), transport="http", wait="none")
        table = TensorSource(dict(weights), None).table
        strided = ((name, t.t().contiguous().t() if t.dim() == 2 else t) for name, t in weights.items())
        again = await client.push_weights(2, strided, tensor_table=table, transport="shared_memory", wait="none")
        assert again.digest == whole.digest

    async def test_nan_is_refused_by_name_and_the_next_push_succeeds(self, service, client, weights):
        with pytest.raises(QuantizationError, match=r"model\.norm\.weight\[3\].*Version 1 stays.*discard\(1\)"):
            await client.push_weights("next", with_nan(weights), transport="shared_memory", wait="none")
        assert service.log.versions() == [0]
        status = await client.push_weights(1, dict(weights), transport="shared_memory", wait="none")
        assert status.state == "committed"

    async def test_a_push_that_was_cancelled_is_pushed_again(self, service, client, weights):
        sent = asyncio.Event()
        push = asyncio.create_task(
            client.push_weights(
                1, dict(weights), transport="shared_memory", wait="none", progress=lambda *_: sent.set()
            )
        )
        await sent.wait()
        await cancelled(push)
        assert client._uploader._shared["shared_memory"]._memory is None  # the ingest may be reading it still
        other = changed(weights, 0.5)
        await client.push_weights(1, other, transport="shared_memory", wait="none")
        expected = await client.push_weights(2, other, transport="http", wait="none")
        assert service.log.manifest(1).digest == expected.digest


@pytest.mark.usefixtures("small_batches")
async def test_pushes_of_one_client_at_once_do_not_overwrite_each_other(service, client, weights):
    """They would share the memory that an earlier push has left."""
    await client.push_weights(1, dict(weights), transport="shared_memory", wait="none")
    versions = {2: changed(weights, 0.5), 3: changed(weights, 0.25)}
    pushes = [client.push_weights(v, new, transport="shared_memory", wait="none") for v, new in versions.items()]
    shared = await asyncio.gather(*pushes)
    for status, (version, new) in zip(shared, versions.items(), strict=True):
        in_parts = await client.push_weights(version + 2, new, transport="http", wait="none")
        assert (status.version, status.digest) == (version, in_parts.digest)


async def test_memory_is_released_if_its_push_is_cancelled_while_it_is_created(client, weights, monkeypatch):
    began, may_create, descriptors = asyncio.Event(), threading.Event(), list[int]()
    loop, create = asyncio.get_running_loop(), SharedMemory.create

    def slowly(nbytes: int) -> SharedMemory:
        loop.call_soon_threadsafe(began.set)
        assert may_create.wait(30)
        memory = create(nbytes)
        descriptors.append(memory.descriptor)
        return memory

    monkeypatch.setattr(SharedMemory, "create", slowly)
    push = asyncio.create_task(client.push_weights(1, dict(weights), transport="shared_memory", wait="none"))
    await began.wait()
    [creating] = [thread for thread in threading.enumerate() if thread.name.startswith("push-weights")]
    await cancelled(push)
    may_create.set()
    await asyncio.to_thread(creating.join)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*descriptors)


class Routes(httpx.AsyncBaseTransport):
    """Notes to which address which requests went."""

    def __init__(self) -> None:
        self._http = httpx.AsyncHTTPTransport()
        self.seen: list[tuple[str, str]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        self.seen.append((f"{url.scheme}://{url.host}:{url.port}", f"{request.method} {url.path}"))
        return await self._http.handle_async_request(request)

    async def aclose(self) -> None:
        await self._http.aclose()

    def batches(self) -> set[str]:
        """The addresses that batches went to."""
        return {to for to, route in self.seen if route == "POST /v1/weights/1/shared"}


@pytest.mark.usefixtures("small_batches")
class TestWhereBatchesAreTold:
    async def test_the_ingest_itself(self, service, weights):
        routes = Routes()
        async with RolloutClient(service.url, retries=0, transport=routes) as client:
            await client.push_weights(1, dict(weights), transport="shared_memory", wait="none")
        assert routes.batches() == {str(service.ingest.upload_address)} != {service.url}

    async def test_the_gateway_where_there_is_no_other_address(self, service, weights):
        service.ingest.upload_address, routes = None, Routes()
        async with RolloutClient(service.url, retries=0, transport=routes) as client:
            await client.push_weights(1, dict(weights), transport="shared_memory", wait="none")
        assert routes.batches() == {service.url}

    async def test_the_gateway_once_the_ingest_refuses_the_key(self, model, tmp_path, weights, monkeypatch):
        routes = Routes()
        async with real_ingest(model, tmp_path / "log", token="secret") as service:
            address = service.ingest.upload_address
            monkeypatch.setattr(address, "opens", lambda version, key: False)
            async with RolloutClient(service.url, token="secret", retries=0, transport=routes) as client:
                await client.push_weights(1, dict(weights), transport="shared_memory", wait="none")
        assert routes.batches() == {str(address), service.url}


@pytest.mark.usefixtures("small_batches")
class TestTheWayThatIsTaken:
    async def test_a_small_version_goes_in_parts(self, service, client, weights):
        await client.push_weights(1, dict(weights), wait="none")
        assert await how_it_came(service, 1) == "parts"

    @pytest.mark.usefixtures("worth_sharing")
    async def test_a_large_one_is_shared(self, service, client, weights):
        await client.push_weights(1, dict(weights), wait="none")
        assert await how_it_came(service, 1) == "SharedMemorySource"

    @pytest.mark.usefixtures("worth_sharing")
    async def test_from_another_machine_it_goes_in_parts(self, service, client, weights, monkeypatch):
        monkeypatch.setattr(_shared_memory, "machine", lambda: "another")
        await client.push_weights(1, dict(weights), wait="none")
        assert await how_it_came(service, 1) == "parts"
        with pytest.raises(NotShared, match="another machine"):
            await client.push_weights(2, dict(weights), transport="shared_memory", wait="none")

    @pytest.mark.usefixtures("worth_sharing")
    async def test_memory_that_could_not_be_shared_once_is_tried_again(self, service, client, weights, monkeypatch):
        def create(nbytes: int) -> SharedMemory:
            raise OSError(errno.ENOSPC, "no room")

        monkeypatch.setattr(_shared_memory, "RETRY_S", 0.0)
        with monkeypatch.context() as full:
            full.setattr(SharedMemory, "create", create)
            await client.push_weights(1, dict(weights), wait="none")
        await client.push_weights(2, dict(weights), wait="none")
        assert [await how_it_came(service, version) for version in (1, 2)] == ["parts", "SharedMemorySource"]

    @pytest.mark.usefixtures("worth_sharing")
    async def test_a_version_that_the_service_dropped_is_sent_in_parts(self, service, client, weights):
        discarding: list[asyncio.Task[None]] = []

        def drop(done: int, total: int) -> None:
            if not discarding:
                discarding.append(asyncio.create_task(service.ingest.discard(1)))

        status = await client.push_weights(1, dict(weights), wait="none", progress=drop)
        assert status.state == "committed" and await how_it_came(service, 1) == "parts"


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(1 << 20)
    yield memory
    memory.close()


def source_of(memory: SharedMemory, weights: Weights, transfer: str = "a" * 32) -> SharedMemorySource:
    from rollout_service.runtime.shared_memory import machine

    return SharedMemorySource(
        transfer=transfer,
        machine=machine(),
        process=os.getpid(),
        descriptor=memory.descriptor,
        memory=memory.name,
        tensors=tuple(sorted(begin_of(1, weights).tensors, key=lambda tensor: tensor.name != "model.norm.weight")),
    )


NORM = 0
"""Its number there."""


def batch_of(number: int, first: int, offset: int = 0, count: int = 1, transfer: str = "a" * 32) -> SharedTensors:
    return SharedTensors(transfer=transfer, batch=number, first=first, count=count, offset=offset)


class TestWhatIsRefused:
    @pytest.fixture(autouse=True)
    async def begun(self, ingest: Ingest, memory: SharedMemory, weights: Weights) -> None:
        await ingest.begin(BeginUpload(version=1, source=source_of(memory, weights)))

    @pytest.mark.parametrize(
        ("first", "count", "offset", "complaint"),
        [
            (1000, 1, 0, r"tensors 1000 to 1000 are said to lie in the memory, and \d+ were announced"),
            (0, 1000, 0, r"tensors 0 to 999 are said to lie in the memory"),
            (NORM, 1, 32, "multiples of 64"),
            (NORM, 1, 1 << 20, r"model\.norm\.weight, .*the memory has 1048576"),
        ],
    )
    async def test_a_place_outside(self, ingest, first, count, offset, complaint):
        with pytest.raises(InvalidRequest, match=complaint):
            await ingest.take_shared(1, batch_of(0, first, offset, count))

    async def test_a_commit_of_what_has_not_come(self, ingest, weights):
        await ingest.take_shared(1, batch_of(0, NORM))
        await ingest.take_shared(1, batch_of(0, NORM))  # the answer was lost
        with pytest.raises(UploadIncomplete, match=f"lacks {len(weights) - 1} tensors"):
            await ingest.commit(1, CommitUpload())

    async def test_another_push_of_this_trainer_takes_its_place(self, ingest, memory, weights):
        await ingest.begin(BeginUpload(version=1, source=source_of(memory, weights, "b" * 32)))
        with pytest.raises(Exception, match=f"staged by another push than {'a' * 32}"):
            await ingest.take_shared(1, batch_of(0, NORM))
        await ingest.take_shared(1, batch_of(0, NORM, transfer="b" * 32))

    async def test_a_version_whose_trainer_is_gone_is_dropped(self, ingest, memory, weights):
        await ingest.take_shared(1, batch_of(0, NORM))
        memory.close()
        other = SharedMemory.create(1 << 20)
        await ingest.begin(BeginUpload(version=2, source=source_of(other, weights, "b" * 32)))
        with pytest.raises(NotFound, match=f"process {os.getpid()}, whose memory .* has ended: push it again"):
            await ingest.take_shared(1, batch_of(1, NORM + 1))
        assert list(ingest._uploads._trainer_memory._opened) == [other.name]
        other.close()

    async def test_an_ingest_that_starts_anew_says_that_it_must_be_pushed_again(self, ingest, model):
        await ingest.stop()
        async with started(config_of(model, ingest._log.root)) as again:
            with pytest.raises(NotFound, match="cannot be read again: push it anew"):
                await again.take_shared(1, batch_of(0, NORM))


class TestMemory:
    def test_another_process_sees_what_is_written(self, memory):
        memory.view[:5] = b"hello"
        code = (
            "import sys; from rollout_service.runtime.shared_memory import SharedMemory as M; "
            "m = M.open(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]); print(bytes(m.view[:5]).decode())"
        )
        arguments = [str(os.getpid()), str(memory.descriptor), memory.name]
        run = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
        assert run.stdout.strip() == "hello"

    def test_only_memory_of_a_push_that_cannot_shrink_is_opened(self, memory, tmp_path):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, mmap.PAGESIZE)
        fd = os.memfd_create("rollout-weights-" + "0" * 32)
        os.ftruncate(fd, 100)
        with pytest.raises(OSError, match="can shrink"):
            SharedMemory.open(os.getpid(), fd, "0" * 32)
        os.close(fd)
        with (tmp_path / "file").open("w") as file, pytest.raises(FileNotFoundError, match="not the memory"):
            SharedMemory.open(os.getpid(), file.fileno(), memory.name)

    async def test_what_its_trainer_gave_up_is_let_go(self, weights):
        memory = SharedMemory.create(1 << 20)
        opened, source = TrainerMemory(), source_of(memory, weights)
        await opened.hold(source)
        opened.prune()
        assert list(opened._opened) == [memory.name]
        memory.close()
        opened.prune()
        assert list(opened._opened) == [memory.name]
        opened.release(source)
        opened.prune()
        assert opened._opened == {}

    def test_what_is_registered_is_given_back(self, memory, weights):
        registered: list[int] = []

        def register(view: memoryview):
            registered.append(torch.frombuffer(view, dtype=torch.uint8).data_ptr())
            return registered.clear

        opened = TrainerMemory(register)
        opened.open(source_of(memory, weights))
        opened.open(source_of(memory, weights))
        assert len(registered) == 1
        opened.close()
        assert registered == []


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_batch_is_told_of_once_its_numbers_are_known_to_be_sound(is_sound):
    checks, weight = DeferredChecks(), torch.arange(6, dtype=torch.bfloat16).view(2, 3)

    def complain() -> None:
        raise QuantizationError("norm[3] is nan")

    def asking() -> Iterator[tuple[str, torch.Tensor]]:
        checks.add(torch.tensor(is_sound), complain)
        yield "norm", weight

    memory = _shared_memory.HostMemory(4096)
    try:
        batch = [describe("norm", weight)]
        with nullcontext() if is_sound else pytest.raises(QuantizationError, match=r"norm\[3\] is nan"):
            _shared_memory.fill(memory, 0, batch, asking(), checks)
        assert torch.equal(memory.room(0, 12).view(torch.bfloat16), weight.view(-1))
    finally:
        memory.close()
