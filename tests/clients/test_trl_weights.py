"""TRL 1.16's own clients push weights: the sync trainers' and the async one's, with gloo in place of NCCL."""

import asyncio
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_service.client import RolloutClient
from rollout_service.local import LocalService
from tests.support.gloo_trainer import free_port, open_trainer_endpoint, packed_broadcast, update_info
from tests.support.telltale import assert_pure, canary_weights

FOLDER = Path(__file__).parents[2] / ".venv-trl"
INSTALL = (
    "pip install --no-deps --target .venv-trl trl==1.16.0 accelerate datasets pyarrow pandas multiprocess dill; "
    "TRL wants vLLM, torch and transformers beside it"
)
if not FOLDER.exists():
    pytest.skip(f"TRL is not installed: {INSTALL}", allow_module_level=True)
sys.path.append(str(FOLDER))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that it is experimental, and that it knows vLLM up to 0.31
    from trl.experimental.async_grpo import vllm_client as async_client
    from trl.experimental.async_grpo import weight_transfer as async_transfer
    from trl.generation import vllm_client as sync_client


@pytest.fixture(autouse=True)
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of TRL's processes needs CUDA, over gloo; and the address at which the trainer is found."""
    for module in (sync_client, async_transfer):
        monkeypatch.setattr(module, "open_trainer_endpoint", open_trainer_endpoint)
        monkeypatch.setattr(module, "packed_nccl_broadcast_producer", packed_broadcast)
        monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")


@pytest.fixture
def trl(service: LocalService) -> Iterator[Any]:
    """The sync trainers' client, with its communicator."""
    trl = sync_client.VLLMClient(service.url, group_port=free_port())
    trl.init_communicator("cuda")  # without an index it asks CUDA for nothing
    yield trl
    trl._post(f"{trl.base_url}/shutdown_weight_transfer_engine")
    trl.close_communicator()


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


async def test_the_sync_client_pushes_a_model(
    service: LocalService, client: RolloutClient, trl: Any, next_version: int
) -> None:
    for version in (next_version, next_version + 1):
        model = Parameters(canary_weights(service.config.model.path, version))
        await asyncio.to_thread(trl.update_model_params, model)
        await asyncio.to_thread(trl.reset_prefix_cache)
        await assert_served(client, version)


async def test_the_sync_client_pushes_a_model_tensor_by_tensor(
    service: LocalService, client: RolloutClient, trl: Any, next_version: int
) -> None:
    weights = canary_weights(service.config.model.path, next_version)

    def push() -> None:
        with trl.weight_update():  # as the online DPO trainer does
            for name, tensor in weights.items():
                trl.update_named_param(name, tensor)

    await asyncio.to_thread(push)
    await assert_served(client, next_version)


async def test_one_tensor_is_no_version(
    service: LocalService, client: RolloutClient, trl: Any, next_version: int
) -> None:
    weights = canary_weights(service.config.model.path, next_version)
    with pytest.raises(Exception, match=r"Request failed: 422.*missing: "):
        await asyncio.to_thread(trl.update_named_param, "model.norm.weight", weights["model.norm.weight"])
    await asyncio.to_thread(trl.update_model_params, Parameters(weights))
    await assert_served(client, next_version)


async def test_the_async_trainers_client_pushes_weights(
    service: LocalService, client: RolloutClient, next_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_transfer, "get_open_port", free_port)
    first = canary_weights(service.config.model.path, next_version)
    vllm = async_client.VLLMClient(service.url)
    trl = async_transfer.WeightTransferClient(vllm, update_info(first))

    def push(version: int) -> None:
        trl.pause()
        trl.send_weights(iter(canary_weights(service.config.model.path, version).items()))
        trl.resume()

    await asyncio.to_thread(trl.init_weight_transfer)
    for version in (next_version, next_version + 1):
        await asyncio.to_thread(push, version)
        await assert_served(client, version)
    assert vllm.get_world_size() == 1 and vllm.get_dtype() == "torch.bfloat16"
    trl.destroy()
