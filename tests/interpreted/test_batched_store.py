"""What is stored in a log in memory from a GPU has the digests that the host would give it."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from rollout_service.errors import QuantizationError
from rollout_service.ingest import batched_store
from rollout_service.ingest.batched_store import BatchedStore
from rollout_service.protocol.tensors import TensorSlot
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.store import manifest, writer
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import StoredTensor
from tests.interpreted.in_memory import assert_same_files, writer_in

pytestmark = pytest.mark.usefixtures("host_digests")
CHUNK = 2048
SHAPES = {
    "large": (3, CHUNK // 2 + 7),
    "odd": (1, CHUNK - 95),
    "end": (CHUNK + 100,),
    "scales": (5, 20),
    "none": (0, 4),
    "chunk": (CHUNK,),
    "beside": (48,),
    "by itself": (2, CHUNK),
    "last": (33,),
    "larger than the scratch": (5 * CHUNK + 7,),
}


def stored(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    gpu: torch.device | None = None,
    checks: dict[str, bool] | None = None,
    turn: "threading.Lock | None" = None,
) -> tuple[StoredTensor, ...]:
    """``checks``: of these tensors, what is found of their numbers."""
    slots = [TensorSlot(name=name, dtype="int8", shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    writer = writer_in(folder, Layout(slots))
    asked = DeferredChecks()
    with BatchedStore(writer, gpu, asked, turn or threading.Lock()) as filling:
        for name, tensor in tensors.items():
            if checks is not None:
                asked.add(torch.tensor(checks[name]), partial(complain, name))
            filling.fill(name, tensor)
    return writer.finish()


def complain(name: str) -> None:
    raise QuantizationError(f"{name} holds what it may not")


ALL = set(SHAPES.values())
CPU = torch.device("cpu")


@pytest.mark.parametrize(("held_bytes", "least_packed"), [(1, 2), (1 << 30, 2), (1 << 30, 4)])
@pytest.mark.parametrize(
    ("lie_on_gpu", "gpu"),
    [(ALL, None), (set(), CPU), ({SHAPES["odd"], SHAPES["chunk"], SHAPES["beside"]}, CPU)],
    ids=["on the GPU", "on the host", "some on each"],
)
def test_digests_and_bytes_are_those_of_the_host(tmp_path, monkeypatch, held_bytes, least_packed, lie_on_gpu, gpu):
    for module in (manifest, batched_store, writer):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    tensors = {name: torch.randint(-127, 128, shape, dtype=torch.int8) for name, shape in SHAPES.items()}
    by_host = stored(tmp_path / "host", tensors)
    monkeypatch.setattr(batched_store, "lies_on_gpu", lambda tensor: tensor.shape in lie_on_gpu)
    monkeypatch.setattr(batched_store, "_SCRATCH_BYTES", 2 * CHUNK + 64)
    monkeypatch.setattr(batched_store, "_PACKED_BYTES", 2 * CHUNK - 1)
    monkeypatch.setattr(batched_store, "_HELD_BYTES", held_bytes)
    monkeypatch.setattr(batched_store, "_MIN_PACKED", least_packed)
    assert stored(tmp_path / "gpu", tensors, gpu) == by_host
    assert_same_files(by_host, tmp_path / "gpu", tmp_path / "host")


@pytest.mark.parametrize("held_bytes", [1, 1 << 30])
def test_a_tensor_with_numbers_that_may_not_be_is_not_stored_and_ends_its_turn(tmp_path, monkeypatch, held_bytes):
    held: list[bool] = []

    def on_gpu(tensor: torch.Tensor) -> bool:
        held.append(turn.locked())
        return True

    turn = threading.Lock()
    monkeypatch.setattr(batched_store, "lies_on_gpu", on_gpu)
    monkeypatch.setattr(batched_store, "_HELD_BYTES", held_bytes)
    tensors = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in SHAPES.items()}
    sound = dict.fromkeys(SHAPES, True)
    assert len(stored(tmp_path / "sound", tensors, checks=sound, turn=turn)) == len(SHAPES)
    assert held == [True] * len(SHAPES) and not turn.locked()
    with pytest.raises(QuantizationError, match="scales holds what it may not"):
        stored(tmp_path / "unsound", tensors, checks=sound | {"scales": False, "chunk": False}, turn=turn)
    assert not turn.locked()
