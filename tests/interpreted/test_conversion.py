"""What an ingest with a GPU makes of a trainer's tensors in GPU memory, one by one or by a plan of a batch, against
what the host makes of them: the same digests and bytes. Streams and CUDA's handles: tests/gpu/test_cuda_ipc.py."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollout_service.errors import QuantizationError
from rollout_service.ingest import batched_store
from rollout_service.ingest.batch_plan import BatchPlans
from rollout_service.ingest.conversion import Conversion
from rollout_service.ingest.sources.shared_memory import GpuMemory, shared_buckets
from rollout_service.model import convert
from rollout_service.model.convert import Converter
from rollout_service.protocol.upload import SharedTensors, TrainerRecipe, placed
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import StoredTensor
from tests.interpreted.as_on_gpu import AsOnGpu
from tests.interpreted.in_memory import assert_same_files, writer_in
from tests.interpreted.test_planned_batch import TrainersMemory

SHAPES = {
    "q": (128, 256),
    "norm": (100,),
    "k": (130, 128),
    "v": (130, 128),
    "o": (128, 128),
    "another norm": (33,),
    "bias": (7,),
    "none": (0, 5),
    "head": (100, 64),
}
RECIPE = TrainerRecipe(weights="fp8_block", quantized=("k", "o", "q", "v"), keep_float32=("bias",))
pytestmark = pytest.mark.usefixtures("host_digests")


class _Memory:
    """In place of ``OtherGpuMemory``."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.nbytes = memory, memory.nbytes

    def room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, start: int, target: torch.Tensor) -> None:
        target.copy_(self._memory[start : start + target.nbytes])


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> AsOnGpu:
    return AsOnGpu(monkeypatch, batched_store, convert)


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
    converter = Converter(RECIPE, device="cpu")
    layout = Layout(converter.slots(SHAPES))
    writer = writer_in(folder, layout)
    trainers = TrainersMemory({name: tensors[name] for names in batches for name in names}, start=0)
    starts = [start for _, start in placed(trainers.table, 0)]
    with ThreadPoolExecutor(3) as executor:
        conversion = Conversion(1, writer, converter.convert, executor)
        if planned:
            conversion.gpu, conversion.plans = torch.device("cpu"), BatchPlans(converter, layout.places)
        source, first = GpuMemory(None, _Memory(trainers.data)), 0
        for number, names in enumerate(batches):
            body = SharedTensors(transfer="f" * 32, batch=number, first=first, count=len(names), offset=starts[first])
            for bucket in shared_buckets(trainers.table, body, source):
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
    assert_same_files(by_host, tmp_path / "gpu", tmp_path / "host")


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("planned", HOW.values(), ids=HOW)
@pytest.mark.parametrize("bad", ["k", "another norm", "head", "bias"])
def test_what_is_not_finite_is_refused_by_name(tmp_path, bad, planned):
    with pytest.raises(QuantizationError, match=rf"{bad}\["):
        stored(tmp_path / "gpu", weights(bad), BATCHES[1], planned=planned)
