"""Versions through memory of a GPU that trainer and ingest share: all but CUDA's calls, whose place files take here.

With the calls themselves: tests/gpu/test_cuda_ipc.py.
"""

import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rollout_service.client import RolloutClient, _shared_memory, _tensors
from rollout_service.errors import NotShared, QuantizationError
from rollout_service.gpu.memory import OwnGpuMemory
from rollout_service.ingest.sources import shared_memory as source
from rollout_service.protocol.upload import UploadTensor
from tests.unit.client.conftest import with_nan
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.client.test_shared_memory import how_it_came

FILES: dict[str, Path] = {}
"""Memory that has a handle, by it."""


class OwnFile:
    """In place of ``OwnGpuMemory``."""

    gpu = "GPU-of-a-test"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.truncate(nbytes)
        self.handle = uuid.uuid4().hex * 4
        FILES[self.handle] = Path(file.name)
        self.tensor = torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)

    def free(self) -> None:
        FILES.pop(self.handle).unlink()


COPIES: list[tuple[int, int]] = []
"""Where each copy began, and its bytes."""


class OthersFile:
    """In place of ``OtherGpuMemory``."""

    def __init__(self, handle: str, nbytes: int) -> None:
        if handle not in FILES:
            raise OSError("cudaIpcOpenMemHandle: invalid resource handle (cudaErrorInvalidResourceHandle)")
        self.nbytes = nbytes
        self._memory = torch.from_file(str(FILES[handle]), shared=True, size=nbytes, dtype=torch.uint8)

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, start: int, target: torch.Tensor) -> None:
        COPIES.append((start, target.nbytes))
        target.copy_(self._memory[start : start + target.nbytes])

    def close(self) -> None:
        del self._memory


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_shared_memory, "OwnGpuMemory", OwnFile)
    monkeypatch.setattr(_shared_memory.GpuMemory, "_given_up", None)
    monkeypatch.setattr(source, "OtherGpuMemory", OthersFile)
    for batch_bytes in ("BATCH_BYTES", "GPU_BATCH_BYTES"):
        monkeypatch.setattr(_shared_memory, batch_bytes, 100_000)
    monkeypatch.setattr(_shared_memory, "MIN_SHARED_BYTES", 0)
    yield
    for path in FILES.values():
        path.unlink()
    FILES.clear()
    COPIES.clear()


@pytest.fixture
async def service(model: Path, tmp_path: Path) -> AsyncIterator[RealIngest]:
    async with ingest_in(tmp_path, model) as running:
        yield running


@asynccontextmanager
async def ingest_in(folder: Path, model: Path) -> AsyncIterator[RealIngest]:
    async with real_ingest(model, folder / "log") as running:
        running.ingest._uploads._trainer_memory._registered = lambda _: lambda: None  # as if it had a GPU
        yield running


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "_gpu_of", lambda pairs: torch.device("cuda", 0))


@pytest.mark.parametrize("quantize", ["service", "trainer"])
async def test_the_version_is_the_one_that_parts_make(service, client, weights, quantize):
    in_parts = await client.push_weights(1, dict(weights), transport="http", wait="none")
    for version in (2, 3):
        status = await client.push_weights(version, dict(weights), transport="cuda_ipc", quantize=quantize, wait="none")
        assert status.digest == in_parts.digest
        assert await how_it_came(service, version) == "CudaIpcSource"
        service.log.verify(service.log.manifest(version))
    assert len(FILES) == 1  # the second push was given the memory of the first
    batches = list(_shared_memory.batches(_tensors.TensorSource(weights, None).table, 100_000))
    if quantize == "service":  # neighbours are one copy
        assert len(COPIES) == 2 * len(batches) < 2 * len(weights)


async def test_nan_is_refused_by_name_and_the_memory_is_not_freed_at_once(service, client, weights):
    for _ in range(3):
        with pytest.raises(QuantizationError, match=r"model\.norm\.weight\[3\]"):
            await client.push_weights(1, with_nan(weights), transport="cuda_ipc", wait="none")
    assert len(FILES) == 1  # of the last push, which the ingest may be reading
    status = await client.push_weights(1, dict(weights), transport="cuda_ipc", wait="none")
    assert status.state == "committed"


def test_memory_that_no_push_has_announced_is_freed_with_its_owner():
    dropped, announced = (_shared_memory.GpuMemory(100) for _ in range(2))
    announced.source((UploadTensor(name="a", dtype="bfloat16", shape=(1,)),))
    assert len(FILES) == 2
    del dropped  # as the result of a push that was cancelled
    assert len(FILES) == 1
    del announced  # the ingest may have it mapped
    assert len(FILES) == 1


async def test_threads_that_take_turns_fill_a_log_in_memory(model, weights):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        async with ingest_in(Path(in_memory), model) as service, RolloutClient(service.url, retries=1) as client:
            in_parts = await client.push_weights(1, dict(weights), transport="http", wait="none")
            with pytest.raises(QuantizationError, match=r"model\.norm\.weight\[3\]"):
                await client.push_weights(2, with_nan(weights), transport="cuda_ipc", wait="none")
            for version in (2, 3, 4):
                status = await client.push_weights(version, dict(weights), transport="cuda_ipc", wait="none")
                assert status.digest == in_parts.digest
                service.log.verify(service.log.manifest(version))


async def test_memory_that_its_trainer_gave_up_is_closed(service, client, weights):
    memories = service.ingest._uploads._trainer_memory
    await client.push_weights(1, dict(weights), transport="cuda_ipc", wait="none")
    memories.prune()
    assert len(memories._opened) == 1
    await client.aclose()
    memories.prune()
    assert memories._opened == {}


@pytest.mark.usefixtures("on_gpu")
class TestAuto:
    """Which tries it first, of tensors on a GPU."""

    async def test_tensors_on_a_gpu_go_this_way_and_others_through_the_hosts_memory(
        self, service, client, weights, monkeypatch
    ):
        await client.push_weights(1, dict(weights), wait="none")
        monkeypatch.setattr(_tensors, "_gpu_of", lambda pairs: None)
        await client.push_weights(2, dict(weights), wait="none")
        assert [await how_it_came(service, version) for version in (1, 2)] == ["CudaIpcSource", "SharedMemorySource"]

    @pytest.mark.parametrize("quantize", ["service", "trainer"])
    async def test_an_ingest_without_a_gpu_takes_the_hosts_memory(self, service, client, weights, quantize):
        service.ingest._uploads._trainer_memory._registered = None
        await client.push_weights(1, dict(weights), quantize=quantize, wait="none")
        assert await how_it_came(service, 1) == "SharedMemorySource"
        assert FILES == {}  # what the trainer had taken of its GPU is free again
        with pytest.raises(NotShared, match="the ingest has no GPU"):
            await client.push_weights(2, dict(weights), transport="cuda_ipc", wait="none")

    async def test_a_handle_that_cuda_does_not_open(self, service, client, weights, monkeypatch):
        monkeypatch.setattr(OwnFile, "__init__", _without_a_handle)
        one_shot = iter(weights.items())
        table = _tensors.TensorSource(dict(weights), None).table
        monkeypatch.setattr(_tensors, "_current_gpu", lambda: torch.device("cuda", 0))
        await client.push_weights(1, one_shot, tensor_table=table, wait="none")
        assert await how_it_came(service, 1) == "SharedMemorySource"
        with pytest.raises(NotShared, match="GPU GPU-of-a-test cannot be read here: cudaIpc"):
            await client.push_weights(2, dict(weights), transport="cuda_ipc", wait="none")

    async def test_a_trainer_whose_gpu_has_no_room(self, service, client, weights, monkeypatch):
        def refuse(self: OwnFile, nbytes: int) -> None:
            raise OSError("cudaMalloc: out of memory (cudaErrorMemoryAllocation)")

        monkeypatch.setattr(OwnFile, "__init__", refuse)
        await client.push_weights(1, dict(weights), wait="none")
        assert await how_it_came(service, 1) == "SharedMemorySource"
        with pytest.raises(NotShared, match="no memory to share: cudaMalloc: out of memory"):
            await client.push_weights(2, dict(weights), transport="cuda_ipc", wait="none")


def _without_a_handle(self: OwnFile, nbytes: int) -> None:
    self.nbytes, self.handle = nbytes, "f" * 128
    self.tensor = torch.empty(nbytes, dtype=torch.uint8)
    self.free = lambda: None


def test_without_cuda_there_is_a_reason(monkeypatch):
    with pytest.raises(OSError, match="no GPU"):
        OwnGpuMemory(100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(OSError, match="cuda-bindings"):
        OwnGpuMemory(100)


class _OnGpu(torch.Tensor):
    """Of the host, and says that it lies on a GPU."""

    gpu: torch.device
    is_cuda = True
    device = property(lambda self: self.gpu)


class _Room:
    """In place of a trainer's memory."""

    nbytes = 4096

    def __init__(self) -> None:
        self.memory = torch.zeros(self.nbytes, dtype=torch.uint8)

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        return self.memory[start : start + nbytes]


def test_the_copies_of_every_gpu_are_waited_for(monkeypatch):
    waited: list[object] = []

    def current_stream(device: object = None) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    tensors = {}
    for name, gpu in (("a", 0), ("b", 3), ("c", 3)):
        tensors[name] = torch.full((5,), gpu, dtype=torch.float32).as_subclass(_OnGpu)
        tensors[name].gpu = torch.device("cuda", gpu)
    table = [UploadTensor(name=name, dtype="float32", shape=(5,)) for name in tensors]
    memory = _Room()
    _shared_memory.fill(memory, 64, table, iter(tensors.items()), None)
    assert memory.room(128, 20).view(torch.float32).tolist() == [3.0] * 5
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:3"]
