"""Release a vLLM worker's memory to a trainer on the same GPU, and reallocate it.

Parameters, staging buffer and KV cache are dropped. The version log has the weights, and results computed with them are
useless afterwards. Everything else that the model holds moves to host memory. On a GPU, vLLM's allocator unmaps the
physical memory but keeps the addresses, so that CUDA graphs and load plans stay valid. On the CPU the storages are
emptied. Dropped memory comes back as zeros: padding is never loaded, and a KV cache with random bytes may hold NaN.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig

from rollout_service.compat.vllm_internals import kv_caches, memory_allocator
from rollout_service.engine.loading.rebind import held_tensors

_STAGING = "staging"
"""Tag of the staging buffer in vLLM's allocator, which unmaps and remaps memory by tag."""
_MAPPING_BYTES = 64 << 20
"""Extra bytes for the pages with which the driver maps memory."""


def staging_memory(vllm_config: VllmConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which to allocate a staging buffer, so that it is released with the engine's memory."""
    if not vllm_config.model_config.enable_sleep_mode or device.type != "cuda":
        return nullcontext()
    return memory_allocator().use_memory_pool(_STAGING)


class SleepingWorker:
    """Mixed into vLLM's worker class (``engine/worker.py``): methods that a replica calls on every rank while
    paused."""

    weight_transfer_engine: Any

    def drop_memory(self) -> int:
        """Release the memory, and return the number of bytes."""
        engine = self.weight_transfer_engine
        engine.forget_staged()
        storages = _storages([*engine.model.parameters(), *kv_caches(engine.vllm_config)])
        if engine.device.type == "cpu":
            # numpy arrays may still refer to the memory of a storage that is not resizable
            self._emptied = [(storage, storage.nbytes()) for storage in storages if storage.resizable()]
            for storage, _ in self._emptied:
                storage.resize_(0)
            return sum(nbytes for _, nbytes in self._emptied)
        self._kept = [(held, held.cpu()) for held in _other_tensors(engine.model, storages)]
        self.sleep(level=2)  # type: ignore[attr-defined]  # vLLM's, which keeps the model's buffers
        # what is free on the GPU also changes with other processes
        return int(memory_allocator().get_current_usage())

    def missing_memory(self) -> tuple[int, int]:
        """Return the bytes needed to wake up and the free bytes, or zeros if there is enough."""
        device = self.weight_transfer_engine.device
        if device.type == "cpu":
            return 0, 0
        free, _ = torch.cuda.mem_get_info(device)
        needed = memory_allocator().get_current_usage() + _MAPPING_BYTES
        return (needed, free) if free < needed else (0, 0)

    def take_memory(self) -> None:
        """Reallocate the memory. Every parameter is zero until a version is loaded."""
        engine = self.weight_transfer_engine
        if engine.device.type == "cpu":
            for storage, nbytes in self._emptied:
                storage.resize_(nbytes)
        else:
            self.wake_up()  # type: ignore[attr-defined]  # vLLM's
        for storage in _storages([*engine.model.parameters(), *kv_caches(engine.vllm_config)]):
            _bytes(storage).zero_()
        if engine.device.type != "cpu":
            for held, kept in self._kept:
                held.copy_(kept)
            del self._kept


def _other_tensors(model: torch.nn.Module, storages: Iterable[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Return the GPU tensors in the model's modules that are in neither ``storages`` nor buffers, as bytes."""
    known = {storage.data_ptr() for storage in (*storages, *_storages(model.buffers()))}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    held = [value for value in attributes if isinstance(value, torch.Tensor)]
    found = _storages([tensor for tensor in (*held, *(h.tensor for h in held_tensors(model))) if tensor.is_cuda])
    return [_bytes(storage) for storage in found if storage.data_ptr() not in known]


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return each nonempty storage once; tied parameters share theirs."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
