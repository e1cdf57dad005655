"""What an ingest with a GPU makes of a trainer's tensors in GPU memory, one by one or by a plan of a batch, against
what the host makes of them: the same digests and bytes. Streams and CUDA's handles: tests/gpu/test_cuda_ipc.py."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rollout_service.errors import QuantizationError
from rollout_service.ingest import batched_store
from rollout_service.ingest.batch_plan import BatchPlans
from rollout_service.ingest.conversion import Conversion
from rollout_service.ingest.sources.shared_memory import GpuMemory, SharedBatch
from rollout_service.model import convert
from rollout_service.model.convert import Converter
from rollout_service.protocol.ring import aligned
from rollout_service.protocol.upload import SharedTensors, TrainerRecipe, UploadTensor
from rollout_service.quant import quantizer
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.quantizer import Named, Quantized, Quantizer
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.mapped_files import MappedFiles, SpareFiles
from rollout_service.store.writer import LogMemory, VersionWriter

SHAPES = {
    "q": (128, 256),
    "norm": (100,),
    "k": (130, 128),
    "v": (130, 128),
    "o": (128, 128),
    "another norm": (33,),
    "bias": (7,),
    "none": (0, 5),
    "head": (300, 64),
}
RECIPE = TrainerRecipe(weights="fp8_block", quantized=("k", "o", "q", "v"), keep_float32=("bias",))
ANNOUNCED = {name: UploadTensor(name=name, dtype="bfloat16", shape=shape) for name, shape in SHAPES.items()}


class _Memory:
    """In place of ``OtherGpuMemory``."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.nbytes = memory, memory.nbytes

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, start: int, target: torch.Tensor) -> None:
        target.copy_(self._memory[start : start + target.nbytes])


@contextmanager
def no_stream(gpu: torch.device) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(synchronize=lambda: None)


def quantize_as_on_gpu(
    self: Quantizer, weights: Sequence[Named], *, checks: DeferredChecks | None = None, **_: bool
) -> list[Quantized]:
    return self._on_gpu(weights, torch.device("cpu"), to_cpu=False, later=checks)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batched_store, convert):
        monkeypatch.setattr(module, "lies_on_gpu", lambda tensor: True)
    monkeypatch.setattr(quantizer, "own_stream", no_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: None)
    monkeypatch.setattr(Quantizer, "quantize", quantize_as_on_gpu)


def weights(bad: str | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    if bad is not None:
        made[bad].view(-1)[-1] = float("inf")
    return made


def stored(
    folder: Path, tensors: dict[str, torch.Tensor], batches: Sequence[Sequence[str]], *, planned: bool = False
) -> list[StoredTensor]:
    """Raises what the first conversion that failed raised."""
    folder.mkdir()
    spare = SpareFiles(folder)
    spare.begin()
    converter = Converter(RECIPE, device="cpu")
    layout = Layout(converter.slots(SHAPES))
    writer = VersionWriter(folder, layout, LogMemory(MappedFiles(), spare))
    plans = BatchPlans(converter, layout.places) if planned else None
    announced = tuple(ANNOUNCED[name] for names in batches for name in names)
    data = []
    for tensor in (tensors[entry.name] for entry in announced):
        data.append(torch.zeros(aligned(max(tensor.nbytes, 1)), dtype=torch.uint8))
        if tensor.nbytes:
            data[-1][: tensor.nbytes] = tensor.view(-1).view(torch.uint8)
    memory, starts = _Memory(torch.cat(data)), [0, *accumulate(map(len, data))]
    with ThreadPoolExecutor(3) as executor:
        conversion = Conversion(1, writer, converter.convert, executor)
        conversion.gpu = torch.device("cpu") if planned else None
        source, first = GpuMemory(None, memory, executor), 0
        for number, names in enumerate(batches):
            body = SharedTensors(transfer="f" * 32, batch=number, first=first, count=len(names), offset=starts[first])
            for bucket in SharedBatch(announced, body, source).buckets(plans):
                conversion.begin(bucket)
            first += len(names)
    if conversion.failure is not None:
        writer.close()
        raise conversion.failure
    return list(writer.finish())


BATCHES = [[list(SHAPES)], [["q", "norm", "k"], ["v"], ["o", "another norm", "bias", "none"], ["head"]]]
HOW = {"one by one": False, "planned": True}


@pytest.fixture
def by_host(tmp_path: Path) -> list[StoredTensor]:
    return stored(tmp_path / "host", weights(), BATCHES[0])


@pytest.mark.parametrize("planned", HOW.values(), ids=HOW)
@pytest.mark.parametrize("batches", BATCHES, ids=len)
def test_the_version_is_the_one_that_the_host_makes(by_host, tmp_path, request, batches, planned):
    request.getfixturevalue("as_on_gpu")
    assert stored(tmp_path / "gpu", weights(), batches, planned=planned) == by_host
    for file in {tensor.file for tensor in by_host}:
        assert (tmp_path / "gpu" / file).read_bytes() == (tmp_path / "host" / file).read_bytes()


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("planned", HOW.values(), ids=HOW)
@pytest.mark.parametrize("bad", ["k", "another norm", "head", "bias"])
def test_what_is_not_finite_is_refused_by_name(tmp_path, bad, planned):
    with pytest.raises(QuantizationError, match=rf"{bad}\["):
        stored(tmp_path / "gpu", weights(bad), BATCHES[1], planned=planned)
