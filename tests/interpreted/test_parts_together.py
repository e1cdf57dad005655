"""Parts in registered memory, which an ingest with a GPU converts several at once, against what the host makes of each:
the same digests and bytes, the same failures, and the same way with parts that are replaced."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import xxhash

from rollout_service.errors import QuantizationError
from rollout_service.ingest import conversion, rooms, upload_session
from rollout_service.ingest.sources import gpu_parts, parts
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.model import convert
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, TrainerRecipe, UploadTensor
from rollout_service.quant.verdicts import Verdicts
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import StoredTensor
from rollout_service.store.mapped_files import MappedFiles
from rollout_service.store.spare_files import SpareFiles
from rollout_service.store.writer import LogMemory
from tests.interpreted.test_conversion import no_stream

SHAPES = {"embedding": (40, 96), "norm": (33,)} | {f"w{i}": (130, 64 + i) for i in range(6)} | {"none": (0, 5)}
RECIPE = TrainerRecipe(weights="fp8_block", quantized=tuple(name for name in SHAPES if name[0] == "w"))
MODEL = cast(ServedModel, SimpleNamespace(head="", embedding="", tied=False, stored=SHAPES))
PART_BYTES = 4096
TOGETHER = 3
"""Parts."""
CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


class CountingConverter(Converter):
    """Counts what is converted at once."""

    def __init__(self) -> None:
        super().__init__(RECIPE, device="cpu")
        self.calls = 0

    def convert(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, to_cpu: bool = True, verdicts: Verdicts | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.calls += 1
        return super().convert(tensors, to_cpu=to_cpu, verdicts=verdicts)


def codes(seed: int = 0) -> Weights:
    """What a trainer sends that quantizes."""
    torch.manual_seed(seed)
    made = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    return dict(Converter(RECIPE, device="cpu").convert(made.items()))


def stream_of(weights: Weights) -> bytes:
    return b"".join(bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in weights.values())


def begun(folder: Path, weights: Weights, executor: ThreadPoolExecutor, converter: Converter) -> UploadSession:
    """With memory that only the tests of a GPU's ways take for registered."""
    spare = SpareFiles(folder)
    spare.begin()
    table = tuple(
        UploadTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))  # type: ignore[arg-type]
        for name, tensor in weights.items()
    )
    return UploadSession(
        BeginUpload(version=1, tensors=table, uploader="first"),
        folder / "1",
        MODEL,
        converter,
        Layout(converter.slots(SHAPES)),
        PART_BYTES,
        executor,
        memory=LogMemory(MappedFiles(lambda memory: lambda: None), spare),
        gpu_executor=executor,
    )


def accept(
    staged: UploadSession, stream: bytes, numbers: Iterable[int], uploader: str = "first"
) -> "list[weakref.ref[memoryview]]":
    """The memory of each part."""
    held = []
    for part in numbers:
        data = stream[part * PART_BYTES : (part + 1) * PART_BYTES]
        memory, received = memoryview(bytearray(data)), staged.incoming_path(part)
        received.write_bytes(data)
        staged.accept(part, xxhash.xxh3_128_hexdigest(data), received, uploader, memory)
        held.append(weakref.ref(memory))
    return held


@pytest.fixture
def by_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StoredTensor, ...]:
    """What is stored without a GPU, each part by itself."""
    (tmp_path / "host").mkdir()
    monkeypatch.setattr(conversion, "GPU", None)
    with ThreadPoolExecutor(1) as executor:
        staged = begun(tmp_path / "host", codes(), executor, Converter(RECIPE, device="cpu"))
        accept(staged, stream_of(codes()), range(staged.num_parts))
        return asyncio.run(staged.finish())


@pytest.fixture
def as_on_gpu(by_host: tuple[StoredTensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    del by_host  # made before
    monkeypatch.setattr(conversion, "GPU", CPU)
    monkeypatch.setattr(conversion, "own_stream_done", no_stream)
    for module in (rooms, convert):
        monkeypatch.setattr(module, "lies_on_gpu", lambda tensor: True)
    for module in (parts, gpu_parts):
        monkeypatch.setattr(module, "is_registered", lambda memory: True)
        monkeypatch.setattr(module, "BATCH_BYTES", TOGETHER * PART_BYTES)
    monkeypatch.setattr(upload_session, "BATCH_BYTES", TOGETHER * PART_BYTES)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def gate(executor: ThreadPoolExecutor) -> Iterator[threading.Event]:
    """Until it is set, nothing is converted."""
    gate = threading.Event()
    for _ in range(2):
        executor.submit(gate.wait)
    yield gate
    gate.set()


@pytest.mark.usefixtures("as_on_gpu")
async def test_what_has_come_is_converted_together_and_leaves_memory(
    tmp_path: Path, by_host: tuple[StoredTensor, ...], executor: ThreadPoolExecutor, gate: threading.Event
) -> None:
    converter = CountingConverter()
    staged = begun(tmp_path, codes(), executor, converter)
    order = [*range(1, staged.num_parts), 0]
    held = accept(staged, stream_of(codes()), order)
    gate.set()
    assert await staged.finish() == by_host
    assert staged.num_parts > 2 * TOGETHER
    # of each other the tensor without an element, and those that come with a large one
    assert converter.calls <= -(-staged.num_parts // TOGETHER) + 2
    gc.collect()
    assert [memory() for memory in held] == [None] * staged.num_parts
    for file in {tensor.file for tensor in by_host}:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "host" / "1" / file).read_bytes()


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("bad", ["w1", "w4_scale_inv", "norm"])
async def test_what_is_unsound_among_others_is_named(
    tmp_path: Path, executor: ThreadPoolExecutor, gate: threading.Event, bad: str
) -> None:
    unsound = codes()
    unsound[bad].view(-1).view(torch.uint8)[-4:] = 0xFF  # NaN of each dtype
    staged = begun(tmp_path, unsound, executor, CountingConverter())
    accept(staged, stream_of(unsound), range(staged.num_parts))
    gate.set()
    with pytest.raises(QuantizationError, match=rf"^{bad}\["):
        await staged.finish()


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("opened_before", [True, False])
async def test_parts_that_wait_with_others_are_replaced(
    tmp_path: Path,
    by_host: tuple[StoredTensor, ...],
    executor: ThreadPoolExecutor,
    gate: threading.Event,
    opened_before: bool,
) -> None:
    staged = begun(tmp_path, codes(), executor, CountingConverter())
    last = staged.num_parts - 1
    unsound = codes(seed=1)
    unsound["w2"].view(torch.uint8)[0] = 0x7F
    accept(staged, stream_of(unsound), range(last), uploader="second")
    if opened_before:
        gate.set()
    accept(staged, stream_of(codes()), range(last))
    accept(staged, stream_of(codes()), [last])
    gate.set()
    assert await staged.finish() == by_host
    assert len(list(tmp_path.glob("1.parts/part-*"))) == staged.num_parts
