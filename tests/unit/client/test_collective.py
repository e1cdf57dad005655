"""Weights that are spread over ranks."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rollout_service.errors import EngineFailed, InvalidManifest
from rollout_service.model.convert import Converter, tensor_bytes
from rollout_service.protocol.delta_parts import encode_header
from rollout_service.protocol.upload import TrainerRecipe
from tests.unit.client.two_ranks import on_both_ranks, push_all, whole_tensors


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


async def test_a_dtensor_is_announced_and_sent_whole(service, client, mesh):
    plain = {"rows": torch.randn(6, 4), "all": torch.randn(3).bfloat16()}
    sharded = {
        "rows": distribute_tensor(torch.nn.Parameter(plain["rows"]), mesh, [Shard(0)]),
        "all": distribute_tensor(plain["all"], mesh, [Replicate()]),
    }
    await client.push_weights(1, sharded)
    await client.push_weights(2, plain)
    assert service.uploads[1].begin.tensors == service.uploads[2].begin.tensors
    assert service.uploads[1].stream == service.uploads[2].stream


async def test_two_ranks_gather_and_one_of_them_sends(service, tmp_path):
    """Some versions are refused or break down on the way: none may leave the other rank in its gather."""
    service.recipe = TrainerRecipe(weights="fp8_block", quantized=("layer1", "layer4"))
    service.answers["POST", "/v1/weights"].append(InvalidManifest("unknown tensor layer0"))
    service.answers["PUT", "/v1/weights/2/parts/0"].append(EngineFailed("out of disk"))
    service.answers["GET", "/v1/weights/recipe"].append(EngineFailed("no recipe"))
    service.answers["PUT", "/v1/weights/5/parts/3"].append(EngineFailed("out of disk"))
    service.answers["PUT", "/v1/weights/7/parts/1"].append(EngineFailed("out of disk"))
    module = "tests.unit.client.two_ranks"
    outcomes, others = await on_both_ranks(module, push_all, tmp_path / "store", service.url)
    by_http = ["unknown tensor layer0", "out of disk", "live", "no recipe", "out of disk", "live"]
    assert outcomes == [*by_http, "out of disk", "live", "live"]
    assert others == repr(["took part"] * 9)
    whole = whole_tensors()
    assert service.uploads[3].stream == stream_of(whole.items())
    for quantized in (6, 8):
        assert service.uploads[quantized].stream == stream_of(Converter(service.recipe).convert(whole.items()))
    nothing = encode_header(0, [None] * len(service.uploads[9].begin.tensors))
    assert service.uploads[9].begin.delta is not None and service.uploads[9].stream == nothing
    assert 4 not in service.uploads


def stream_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    return b"".join(tensor_bytes(tensor) for _, tensor in tensors)
