"""Uploads in registered memory, which an ingest with a GPU converts by plans: the same digests, bytes and failures as
on the host, and the same replacement of parts."""

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import xxhash

from rollout_service.config import WeightsConfig
from rollout_service.errors import QuantizationError
from rollout_service.ingest import batched_store, conversion
from rollout_service.ingest.resources import Resources
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.model import convert
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, TrainerRecipe
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.staged_file import StagedFile, StagingSpace
from tests.interpreted.as_on_gpu import no_stream
from tests.interpreted.in_memory import assert_same_files, log_memory, table_of

pytestmark = pytest.mark.usefixtures("host_digests")
SHAPES = {"embedding": (40, 96), "norm": (33,)} | {f"w{i}": (130, 64 + i) for i in range(6)} | {"none": (0, 5)}
RECIPE = TrainerRecipe(weights="fp8_block", quantized=tuple(name for name in SHAPES if name[0] == "w"))
MODEL = cast(ServedModel, SimpleNamespace(head="", embedding="", tied=False, stored=SHAPES))
PART_BYTES = 4096
Weights = dict[str, torch.Tensor]


def codes(seed: int = 0) -> Weights:
    """Return the tensors of a trainer that quantizes."""
    torch.manual_seed(seed)
    made = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    return dict(Converter(RECIPE, device="cpu").convert(made.items()))


def stream_of(weights: Weights) -> bytes:
    return b"".join(bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in weights.values())


def begun(folder: Path, weights: Weights, executor: ThreadPoolExecutor) -> UploadSession:
    """Begin an upload into memory that only the tests of a GPU take for registered."""
    config = WeightsConfig(root=folder, part_bytes=PART_BYTES)
    resources = Resources(config, WeightLog(folder), MODEL, Converter(RECIPE, device="cpu"))
    resources.executor = resources.gpu_executor = executor
    resources.memory = log_memory(folder, lambda memory: lambda: None)
    resources.space = StagingSpace(folder / "kept")
    return UploadSession(BeginUpload(version=1, tensors=table_of(weights)), folder / "1", resources)


async def accept(staged: UploadSession, stream: bytes, numbers: Iterable[int]) -> None:
    for part in numbers:
        data = stream[part * PART_BYTES : (part + 1) * PART_BYTES]
        digest = xxhash.xxh3_128_hexdigest(data)
        incoming = await staged.begin_part(part, len(data), digest, "", lambda: None)
        assert incoming is not None
        incoming.open()
        assert incoming.memory is not None
        incoming.memory[:] = data
        await staged.accept(incoming, digest)
        incoming.close()
        staged.parts.end(incoming)


@pytest.fixture
def by_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StoredTensor, ...]:
    """The version as it is stored without a GPU."""
    (tmp_path / "host").mkdir()

    async def stored(executor: ThreadPoolExecutor) -> tuple[StoredTensor, ...]:
        staged = begun(tmp_path / "host", codes(), executor)
        await accept(staged, stream_of(codes()), range(staged.record.num_parts))
        return await staged.finish()

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as executor:
        patch.setattr(conversion, "GPU", None)
        return asyncio.run(stored(executor))


@pytest.fixture
def planned(by_host: tuple[StoredTensor, ...], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that the CPU is a GPU. Yield the sizes in bytes of the copies to it."""
    del by_host  # made before
    copies: list[int] = []
    copy_to = StagedFile.copy_to

    def noted(file: StagedFile, target: torch.Tensor, offset: int) -> None:
        copies.append(target.nbytes)
        copy_to(file, target, offset)

    monkeypatch.setattr(conversion, "GPU", torch.device("cpu"))
    monkeypatch.setattr(conversion, "own_stream_done", no_stream)
    for module in (batched_store, convert):
        monkeypatch.setattr(module, "lies_on_gpu", lambda tensor: True)
    monkeypatch.setattr(StagedFile, "is_registered", lambda *_: True)
    monkeypatch.setattr(StagedFile, "copy_to", noted)
    return copies


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


async def test_a_planned_upload_is_stored_as_on_the_host(tmp_path, by_host, executor, planned):
    staged = begun(tmp_path, codes(), executor)
    await accept(staged, stream_of(codes()), [*range(1, staged.record.num_parts), 0])
    assert await staged.finish() == by_host
    assert sum(planned) >= len(stream_of(codes())) > 4 * PART_BYTES
    assert_same_files(by_host, tmp_path / "1", tmp_path / "host" / "1")


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("bad", ["w1", "w4_scale_inv", "norm"])
async def test_an_invalid_tensor_of_a_bucket_is_named(tmp_path, executor, bad):
    unsound = codes()
    unsound[bad].view(-1).view(torch.uint8)[-4:] = 0xFF  # NaN of each dtype
    staged = begun(tmp_path, unsound, executor)
    await accept(staged, stream_of(unsound), range(staged.record.num_parts))
    with pytest.raises(QuantizationError, match=rf"^{bad}\["):
        await staged.finish()


@pytest.mark.usefixtures("planned")
async def test_replaced_parts_are_converted_again(tmp_path, by_host, executor):
    staged = begun(tmp_path, codes(), executor)
    last = staged.record.num_parts - 1
    unsound = codes(seed=1)
    unsound["w2"].view(torch.uint8)[0] = 0x7F
    await accept(staged, stream_of(unsound), range(last))
    await accept(staged, stream_of(codes()), range(last))
    await accept(staged, stream_of(codes()), [last])
    assert await staged.finish() == by_host
