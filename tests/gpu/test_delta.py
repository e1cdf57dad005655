"""Deltas of weights on a GPU, compared there, and made on a GPU: the versions that a push of all makes."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rollout_service.client import RolloutClient
from rollout_service.ingest.sources import gpu_changes
from rollout_service.ingest.sources.gpu_changes import Changed, Made, made_on
from tests.support.models import make_model
from tests.unit.client.real_ingest import real_ingest
from tests.unit.ingest.trainer import folder_weights


def step(weights: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Change the last bit of one number in a hundred."""
    for tensor in weights.values():
        hit = torch.rand(tensor.shape, device="cuda", generator=generator) < 0.01
        tensor.view(torch.int16).bitwise_xor_(hit)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "sizes",
    [(8 << 20, 64 << 20, 128 << 20), (1 << 10, 4 << 10, 128 << 20), (1 << 10, 4 << 10, 16 << 10)],
    ids=["one piece", "many pieces", "many batches"],
)
async def test_a_delta_is_found_on_the_gpu(
    tmp_path: Path,
    family: str,
    sizes: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_service.protocol.delta.SEGMENT_BYTES", sizes[0])
    monkeypatch.setattr("rollout_service.client._pieces.PIECE_BYTES", sizes[1])
    monkeypatch.setattr("rollout_service.client._pieces.BATCH_BYTES", sizes[2])
    folder = make_model(tmp_path / "model", family)
    weights = {name: tensor.cuda() for name, tensor in folder_weights(folder).items()}
    generator = torch.Generator("cuda").manual_seed(0)
    async with (
        real_ingest(folder, tmp_path / "log", weights={"keep_versions": 10}) as service,
        RolloutClient(service.url) as client,
        RolloutClient(service.url) as other,
    ):
        for version in range(5):
            pushed = await client.push_weights("next", weights, transport="delta", wait="none")
            whole = await other.push_weights("next", weights, transport="http", wait="none")
            assert pushed.digest == whole.digest
            assert (pushed.delta_of is None) == (version == 0)
            step(weights, generator)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_a_delta_is_applied_on_the_gpu(
    tmp_path: Path, in_memory: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    made: list[torch.device] = []

    def watched(device: torch.device, tensors: Sequence[Changed]) -> Made:
        made.append(device)
        return made_on(device, tensors)

    monkeypatch.setattr(gpu_changes, "made_on", watched)
    monkeypatch.setattr("rollout_service.protocol.delta.SEGMENT_BYTES", 1 << 14)
    folder = make_model(tmp_path / "model", family)
    weights = {name: tensor.cuda() for name, tensor in folder_weights(folder).items()}
    generator = torch.Generator("cuda").manual_seed(0)
    async with (
        real_ingest(folder, in_memory / "log", weights={"keep_versions": 10}) as service,
        RolloutClient(service.url) as client,
        RolloutClient(service.url) as other,
    ):
        for _ in range(5):
            pushed = await client.push_weights("next", weights, transport="delta", wait="none")
            whole = await other.push_weights("next", weights, transport="http", wait="none")
            assert pushed.digest == whole.digest
            service.log.verify(service.log.manifest(pushed.version))
            step(weights, generator)
    assert made and {device.type for device in made} == {"cuda"}
