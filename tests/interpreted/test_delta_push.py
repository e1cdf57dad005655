"""Pushes of what has changed in tensors that count as a GPU's: quantized by the kernel in Triton's interpreter, and
looked at and compared as on a GPU. Streams are left out: tests/gpu/test_delta.py."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollout_service.client import RolloutClient, _compare, _pieces
from rollout_service.errors import QuantizationError
from rollout_service.model import convert
from rollout_service.protocol import delta
from rollout_service.protocol.weights import WeightStatus
from tests.interpreted.as_on_gpu import AsOnGpu
from tests.support.models import make_smallest_qwen3
from tests.unit.client.real_ingest import RealIngest, real_ingest
from tests.unit.ingest.trainer import folder_weights

pytestmark = pytest.mark.usefixtures("host_digests")
Tensors = dict[str, torch.Tensor]
NORM, UP_PROJ, HEAD = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
INPUT_NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealIngest]:
    """Changes are looked for in dozens of batches."""
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 2 << 10)
    monkeypatch.setattr(_pieces, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(_pieces, "BATCH_BYTES", 16 << 10)
    model = make_smallest_qwen3(tmp_path / "model")
    async with real_ingest(model, tmp_path / "log", weights={"keep_versions": 10}) as ingest:
        yield ingest


@pytest.fixture
def weights(tmp_path: Path, service: RealIngest) -> Tensors:
    return folder_weights(tmp_path / "model")


@pytest.fixture
def as_on_gpu(service: RealIngest, monkeypatch: pytest.MonkeyPatch) -> AsOnGpu:
    return AsOnGpu(monkeypatch, convert, _compare)


def stepped(weights: Tensors) -> Tensors:
    """The last bit of one number in 50 is another one."""
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        tensor.view(torch.int16).view(-1)[::50] ^= 1
    return new


async def push(client: RolloutClient, weights: Tensors, transport: str = "delta") -> WeightStatus:
    return await client.push_weights("next", weights, transport=transport, wait="none")


async def test_it_is_the_version_that_all_bytes_make(service, weights, as_on_gpu):
    async with RolloutClient(service.url) as client, RolloutClient(service.url) as other:
        base = await push(client, weights)
        assert not as_on_gpu.asked
        pushed = await push(client, stepped(weights))
        assert as_on_gpu.asked and pushed.delta_of == base.version
        assert pushed.digest == (await push(other, stepped(weights), "http")).digest


async def test_a_nan_is_refused_by_name_and_the_base_stays_what_it_was(service, weights, as_on_gpu):
    in_one_batch = [INPUT_NORM, UP_PROJ]
    digests, new = list[str | None](), weights
    async with RolloutClient(service.url) as client, RolloutClient(service.url) as other:
        base = await push(client, weights)
        for bad in ([NORM], [UP_PROJ], [HEAD], [UP_PROJ, NORM, HEAD], in_one_batch):
            new = stepped(new)
            broken = {name: tensor.clone() for name, tensor in new.items()}
            for name in bad:
                broken[name].view(-1)[-3:] = torch.nan
            first = next(name for name in broken if name in bad)
            index = [length - 1 for length in broken[first].shape]
            index[-1] -= 2
            as_on_gpu.asked = 0
            with pytest.raises(QuantizationError) as refused:
                await push(client, broken)
            assert refused.value.detail == {"tensor": first, "index": index, "count": 3}
            assert refused.value.message.startswith(f"{first}{index} is nan")
            assert as_on_gpu.asked and (await client.weights(base.version + 1)).state == "staged"
            pushed = await push(client, new)
            assert pushed.delta_of == base.version
            digests, base = [*digests, pushed.digest], pushed
        # a second step takes the first one back
        of_new, of_weights = [(await push(other, each, "http")).digest for each in (new, weights)]
        assert digests == [of_new, of_weights, of_new, of_weights, of_new]


async def test_a_nan_where_most_has_changed_is_refused_too(service, weights, as_on_gpu):
    async with RolloutClient(service.url) as client, RolloutClient(service.url) as other:
        base = await push(client, weights)
        new = {name: -tensor for name, tensor in weights.items()}
        last = list(weights)[-1]
        broken = {**new, last: new[last].clone()}
        broken[last].view(-1)[0] = torch.nan
        with pytest.raises(QuantizationError, match=rf"{last}\[0.*\] is nan"):
            await push(client, broken)
        assert as_on_gpu.asked and (await client.weights(base.version + 1)).state == "staged"
        pushed = await push(client, new)
        assert pushed.delta_of is None
        assert pushed.digest == (await push(other, new, "http")).digest
