"""Deltas of weights on a GPU, compared there, and made on a GPU: the versions that a push of all makes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rollout_service.client import RolloutClient
from rollout_service.client._sent_weights import Changes, SentWeights
from rollout_service.client._tensors import TensorSource, TensorThread
from rollout_service.config.engine import QuantConfig
from rollout_service.errors import QuantizationError
from rollout_service.ingest.sources import gpu_changes
from rollout_service.ingest.sources.gpu_changes import Changed, Made, made_on
from rollout_service.model.convert import Converter
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import TrainerRecipe
from rollout_service.quant.deferred_checks import DeferredChecks
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
async def test_a_delta_is_found_on_the_gpu(tmp_path, family, sizes, monkeypatch):
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


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
async def test_a_nan_is_refused_by_name_and_the_base_stays_what_it_was(tmp_path, name):
    folder = make_model(tmp_path / "model", "qwen3")
    weights = {name: tensor.cuda() for name, tensor in folder_weights(folder).items()}
    generator = torch.Generator("cuda").manual_seed(0)
    async with (
        real_ingest(folder, tmp_path / "log") as service,
        RolloutClient(service.url) as client,
        RolloutClient(service.url) as other,
    ):
        base = await client.push_weights("next", weights, transport="delta", wait="none")
        step(weights, generator)
        broken = weights | {name: weights[name].clone()}
        broken[name].view(-1)[-1] = torch.nan
        with pytest.raises(QuantizationError, match=rf"{name}\[.*\] is nan"):
            await client.push_weights("next", broken, transport="delta", wait="none")
        pushed = await client.push_weights("next", weights, transport="delta", wait="none")
        whole = await other.push_weights("next", weights, transport="http", wait="none")
        assert pushed.delta_of == base.version and pushed.digest == whole.digest


class Compared:
    """What a push of a step's changes does in the thread that is a push's own."""

    def __init__(self, folder: Path) -> None:
        recipe = TrainerRecipe(
            weights="fp8_block", quantized=tuple(ServedModel.load(folder).plan(QuantConfig()).quantized)
        )
        self._weights = {name: tensor.cuda() for name, tensor in folder_weights(folder).items()}
        self._generator = torch.Generator("cuda").manual_seed(0)
        self._converter = Converter(recipe, device="cpu")
        self._sent = SentWeights(tuple(self._converter.table(TensorSource(self._weights, None).table)))
        for _ in self._sent.take(self._converter.convert(self._weights.items(), to_cpu=False)):
            pass

    async def again(self) -> Changes | None:
        step(self._weights, self._generator)
        thread, checks = TensorThread(), DeferredChecks()
        stored = self._converter.convert(self._weights.items(), to_cpu=False, checks=checks)
        try:
            return await thread.call(self._sent.changes_to, stored, checks)
        finally:
            thread.close()


async def test_further_pushes_take_no_more_of_the_gpu(tmp_path):
    """Each has a thread of its own, and torch keeps the memory of every stream that something was allocated in."""
    compared = Compared(make_model(tmp_path / "model", "qwen3"))
    reserved = []
    for _ in range(8):
        assert await compared.again()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[2]


async def test_a_comparison_waits_for_nothing_but_events(tmp_path):
    compared = Compared(make_model(tmp_path / "model", "qwen3"))
    assert await compared.again()  # compiles kernels, and tries the one that hashes
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert any(await compared.again() or ())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_a_delta_is_applied_on_the_gpu(tmp_path, in_memory, monkeypatch, family):
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
