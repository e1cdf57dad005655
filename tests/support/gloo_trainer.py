"""A trainer's rank in this process: serves the group's store and broadcasts over gloo, with vLLM's own cuts.

``open_trainer_endpoint`` and ``packed_broadcast`` have the signatures of vLLM's ``nccl_common.trainer_init`` and
``packed_tensor.packed_nccl_broadcast_producer``, which need CUDA: tests put them in their place in the trainer's
process, and leave everything else of a trainer as it was released.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch documents its stores here
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES, pack_tensors

from rollout_service.ingest.receiver.links import BACKEND_KEY, GLOO_PREFIX

TIMEOUT = timedelta(seconds=120)
PACKED_BUFFER_BYTES = 512 << 10
"""Small, so that a small model comes in several broadcasts."""

Weights = Mapping[str, torch.Tensor]


def trainer_info() -> NCCLTrainerInitInfo:
    """Of rank 0 of a group of two, for vLLM's trainer engine."""
    return NCCLTrainerInitInfo(
        master_address="127.0.0.1",
        master_port=free_port(),
        world_size=2,
        packed_buffer_size_bytes=PACKED_BUFFER_BYTES,
        rank=0,
    )


def use_gloo(patch: pytest.MonkeyPatch, module: ModuleType = nccl_engine) -> None:
    """In a trainer's process, in the module that calls what needs CUDA."""
    patch.setattr(module, "open_trainer_endpoint", open_trainer_endpoint)
    patch.setattr(module, "packed_nccl_broadcast_producer", packed_broadcast)


def _described(source: "Tensors") -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source.weights.items()]


class Tensors(WeightSource):
    """The weights that vLLM's trainer engine sends next, as vLLM 0.32 asks for them and as 0.33 does."""

    # 0.33 reads a cached property, 0.32 calls a method
    metadata: Any = cached_property(_described) if hasattr(WeightSource, "iter_full") else _described

    def __init__(self) -> None:
        self._weights: Weights = {}

    @property
    def weights(self) -> Weights:
        """Those of the next round."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights
        self.__dict__.pop("metadata", None)  # the cached one of the round before

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights.items())

    __iter__ = iter_full


class AnnouncesOnce:
    """A client of vLLM's trainer engine, 0.32, that says what 0.33's says.

    The table of the last finished round is replaced by an empty one.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._sent: dict[str, Any] | None = None
        self._finished: dict[str, Any] | None = None
        self.announced: list[dict[str, Any]] = []
        """What was sent in each round."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._sent = update_info
        said = {key: [] for key in update_info} if update_info == self._finished else update_info
        self.announced.append(said)
        self._client.update_weights(said)

    def finish_weight_update(self, *version: str) -> None:
        self._client.finish_weight_update(*version)
        self._finished = self._sent


class GlooTrainer:
    """Rank 0 of a group of two. ``join`` and ``broadcast`` block."""

    def __init__(
        self,
        port: int = 0,
        *,
        packed: bool = True,
        packed_buffer_bytes: int = PACKED_BUFFER_BYTES,
        speaks_gloo: bool = True,
    ) -> None:
        """Serve the store; ``port`` 0: any that is free. ``speaks_gloo``: False keeps it from saying so."""
        self.packed, self.packed_buffer_bytes = packed, packed_buffer_bytes
        listener = socket.create_server(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )
        if speaks_gloo:
            store.set(BACKEND_KEY, "gloo")
        self.group = SimpleNamespace(store=store, socket=None)
        """As of vLLM's communicators, of which TRL lets go by emptying it."""
        self._gloo: Any = None

    @property
    def init_info(self) -> dict[str, Any]:
        """As vLLM's ``worker_init_payload`` makes it."""
        return {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": 2,
            "packed": self.packed,
            "packed_buffer_size_bytes": self.packed_buffer_bytes,
            "packed_num_buffers": 2,
        }

    def join(self) -> None:
        """Returns when the receiver has joined, too."""
        self._gloo = ProcessGroupGloo(PrefixStore(GLOO_PREFIX, self.group.store), 0, 2, TIMEOUT)

    def broadcast(self, tensors: Iterable[tuple[str, torch.Tensor]], *, packed: bool | None = None) -> None:
        """All of them; ``packed``: None means as ``init_info`` says."""
        for data in self._chunks(iter(tensors), self.packed if packed is None else packed):
            self.broadcast_bytes(data)

    def broadcast_bytes(self, data: torch.Tensor) -> None:
        """One broadcast."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._gloo.broadcast([data], options).wait()

    def _chunks(self, tensors: Iterator[tuple[str, torch.Tensor]], packed: bool) -> Iterator[torch.Tensor]:
        if not packed:
            yield from (tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors)
            return
        while (chunk := pack_tensors(tensors, lambda item: item[1], self.packed_buffer_bytes)) is not None:
            yield chunk.packed_tensor

    def close(self) -> None:
        """As the trainer's death does: its store and its connections are gone."""
        self._gloo = self.group.store = None

    destroy = close


def open_trainer_endpoint(init_info: Any, rank: int = 0) -> GlooTrainer:
    """In place of ``nccl_common.trainer_init``: returns when the service has joined."""
    info = init_info if isinstance(init_info, dict) else asdict(init_info)
    assert (info["world_size"], rank) == (2, 0), info
    buffer_bytes = info.get("packed_buffer_size_bytes", DEFAULT_PACKED_BUFFER_SIZE_BYTES)
    trainer = GlooTrainer(info["master_port"], packed_buffer_bytes=buffer_bytes)
    trainer.join()
    return trainer


def packed_broadcast(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: GlooTrainer,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    num_buffers: int = 2,
) -> None:
    """In place of ``packed_tensor.packed_nccl_broadcast_producer``."""
    assert (src, buffer_size_bytes) == (0, group.packed_buffer_bytes)
    group.broadcast(((item[0], post_iter_func(item)) for item in iterator), packed=True)


def update_info(weights: Weights) -> dict[str, Any]:
    """What is about to be broadcast."""
    return {
        "names": [*weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
