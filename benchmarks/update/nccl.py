"""A trainer that broadcasts its weights over NCCL, by vLLM's own classes, to the receiver of the ingest."""

import socket
from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

PACKED_BYTES = 512 << 20
"""Of tensors, that one broadcast sends."""


class _Source(WeightSource):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        """See vLLM's."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


class Broadcasts:
    """Those of one trainer. ``tensors``: on the GPU that it broadcasts from, which is not the ingest's."""

    def __init__(self, url: str, tensors: dict[str, torch.Tensor]) -> None:
        self._device = next(iter(tensors.values())).device
        torch.cuda.set_device(self._device)
        info = NCCLTrainerInitInfo(
            master_address="127.0.0.1", master_port=_free_port(), world_size=2, packed=True,
            packed_buffer_size_bytes=PACKED_BYTES, rank=0,
        )  # fmt: skip
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=HTTPVLLMWeightSyncClient(url), source=_Source(tensors)
        )

    def push(self) -> None:
        """The tensors as they are now, until they are committed; the service gives the version its number."""
        torch.cuda.set_device(self._device)  # of this thread
        self._engine.send_weights()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
