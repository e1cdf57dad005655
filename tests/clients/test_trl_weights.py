"""TRL 1.16's own clients push weights: the sync trainers' and the async one's, with gloo in place of NCCL."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout_service.client import RolloutClient
from tests.clients.conftest import Trl
from tests.support.gloo_trainer import free_port, update_info, use_gloo
from tests.support.telltale import assert_pure, canary_weights

pytestmark = pytest.mark.client("TRL, sync")


@pytest.fixture
def over_gloo(trl: Trl, monkeypatch: pytest.MonkeyPatch) -> Trl:
    """What of the trainer's process needs CUDA is replaced, and the address at which the trainer is found."""
    for module in (trl.sync_client, trl.async_transfer):
        use_gloo(monkeypatch, module)
        monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(trl.async_transfer, "get_open_port", free_port)
    return trl


@pytest.fixture
def joined(over_gloo: Trl, service_url: str) -> Iterator[Any]:
    """The synchronous trainers' client, with its communicator."""
    joined = over_gloo.sync_client.VLLMClient(service_url, group_port=free_port())
    joined.init_communicator("cuda")  # without an index it asks CUDA for nothing
    yield joined
    joined.close_communicator()


class Parameters(torch.nn.Module):
    """A model as ``update_model_params`` sees it."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, torch.nn.Parameter(tensor)) for name, tensor in self.weights.items())


async def assert_served(client: RolloutClient, version: int) -> None:
    completion = (await client.generate([5, 6], max_tokens=4, temperature=0.0)).completions[0]
    assert completion.versions == (version,)
    assert_pure(completion)


async def test_the_sync_client_pushes_a_model(model, client, joined, next_version):
    for version in (next_version, next_version + 1):
        weights = Parameters(canary_weights(model, version))
        await asyncio.to_thread(joined.update_model_params, weights)
        await asyncio.to_thread(joined.reset_prefix_cache)
        await assert_served(client, version)


async def test_the_sync_client_pushes_a_model_tensor_by_tensor(model, client, joined, next_version):
    weights = canary_weights(model, next_version)

    def push() -> None:
        with joined.weight_update():  # as the online DPO trainer does
            for name, tensor in weights.items():
                joined.update_named_param(name, tensor)

    await asyncio.to_thread(push)
    await assert_served(client, next_version)


async def test_one_tensor_is_no_version(model, client, joined, next_version):
    weights = canary_weights(model, next_version)
    with pytest.raises(Exception, match=r"Request failed: 422.*missing: "):
        await asyncio.to_thread(joined.update_named_param, "model.norm.weight", weights["model.norm.weight"])
    await asyncio.to_thread(joined.update_model_params, Parameters(weights))
    await assert_served(client, next_version)


async def test_the_async_trainers_client_pushes_weights(over_gloo, model, service_url, client, next_version):
    first = canary_weights(model, next_version)
    vllm = over_gloo.async_client.VLLMClient(service_url)
    transfer = over_gloo.async_transfer.WeightTransferClient(vllm, update_info(first))

    def push(version: int) -> None:
        transfer.pause()
        transfer.send_weights(iter(canary_weights(model, version).items()))
        transfer.resume()

    await asyncio.to_thread(transfer.init_weight_transfer)
    for version in (next_version, next_version + 1):
        await asyncio.to_thread(push, version)
        await assert_served(client, version)
    assert vllm.get_world_size() == 1 and vllm.get_dtype() == "torch.bfloat16"
    transfer.destroy()
