"""A broadcast over NCCL: the trainer is this process on GPU 1, the receiver a process on GPU 0."""

import asyncio
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from rollout_service.ingest.ingest import Ingest
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.weight_transfer import TransferInit
from tests.support.gloo_trainer import AnnouncesOnce, Tensors, free_port
from tests.support.models import make_model, random_weights
from tests.unit.ingest import expected
from tests.unit.ingest.trainer import config_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")


class InThisProcess:
    """vLLM's ``VLLMWeightSyncClient`` without HTTP."""

    def __init__(self, ingest: Ingest) -> None:
        self._transfer, self._loop = ingest.transfer, asyncio.get_running_loop()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._run(self._transfer.init(TransferInit.model_validate(init_info)))

    def start_weight_update(self) -> None:
        self._run(self._transfer.start())

    def update_weights(self, update_info: Any) -> None:
        self._run(self._transfer.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.status = self._run(self._transfer.finish(weight_version))

    def shutdown_weight_transfer_engine(self) -> None:
        self._run(self._transfer.shutdown())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
async def test_a_broadcast_becomes_the_version_of_an_upload(tmp_path, packed):
    model = make_model(tmp_path / "qwen3", "qwen3")
    ingest = Ingest(config_of(model, tmp_path / "log", scaling={"min_replicas": 0}))
    await ingest.start()
    client, weights = InThisProcess(ingest), random_weights(model, 1)
    assert ingest.transfer.status().backend == "nccl"
    info = NCCLTrainerInitInfo(
        master_address="127.0.0.1", master_port=free_port(), world_size=2, packed=packed,
        packed_buffer_size_bytes=1 << 20, rank=0,
    )  # fmt: skip

    def push() -> None:
        torch.cuda.set_device(1)  # of this thread
        source = Tensors()
        source.weights = {name: tensor.cuda(1) for name, tensor in weights.items()}
        engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=AnnouncesOnce(client), source=source)
        for _ in range(2):
            engine.send_weights()
        engine.shutdown()

    await asyncio.to_thread(push)
    digest = expected.digest(weights, ServedModel.load(model).fingerprint)
    assert (client.status.version, client.status.digest) == (2, digest)
    await ingest.stop()
