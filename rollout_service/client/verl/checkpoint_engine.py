"""verl's CheckpointEngine over our upload client: rank 0 of the trainer uploads, every rank gathers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.checkpoint_engine.base import CheckpointEngine

from rollout_service.client._tensors import described, drain, other_ranks_gather
from rollout_service.client.verl.settings import ServiceSettings

if TYPE_CHECKING:
    import torch

    from rollout_service.protocol.upload import UploadTensor

logger = logging.getLogger("rollout_service.client")

Named = tuple[str, "torch.Tensor"]


@dataclass(frozen=True)
class SentVersion:
    """The version number, which a rollout worker receives instead of weights. The weights went to the service."""

    version: int

    async def __aiter__(self) -> AsyncIterator[Named]:
        """Yield no tensors."""
        nothing: tuple[Named, ...] = ()
        for pair in nothing:
            yield pair


class RolloutServiceCheckpointEngine(CheckpointEngine):
    """Implements ``checkpoint_engine.backend=rollout_service`` of verl 0.9.1, verl/checkpoint_engine/base.py.

    Each update is one weight version, numbered one above the service's newest. All members of an update learn the
    number when verl builds the topology. Rollout workers use it to map the version to verl's ``global_steps``.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: object) -> None:
        """Store the settings. ``bucket_size`` is unused: the service sets the size of parts. ``settings``:
        ServiceSettings."""
        self._settings = ServiceSettings.model_validate(settings)
        self._is_master = is_master
        self._version: int | None = None
        self._table: list[UploadTensor] | None = None

    def prepare(self) -> dict[str, int]:
        """Return the number of the next version on rank 0 of the trainer, and nothing on other ranks."""
        if not self._is_master:
            return {}
        with self._settings.blocking_client() as client:
            return {"version": max((known.version for known in client.weights()), default=0) + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, int]]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Distribute the version number to all members. There is no group to build: weights travel over HTTP."""
        (version,) = {each["version"] for each in metadata if "version" in each}
        return {"version": [version] * actor_wg_world_size}, {"version": [version] * rollout_world_size}

    def init_process_group(self, version: int) -> None:
        """Store the version number."""
        self._version = version

    def finalize(self) -> None:
        """Forget the version number."""
        self._version = None

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, float]:
        """Upload on rank 0, and join the gathers on all ranks; return once every live replica has loaded the version.

        The first call holds the tensors in rank 0's host memory until all names and shapes are known. Later calls hold
        one tensor at a time. Raises the errors of ``RolloutClient.push_weights``, after the remaining gathers, so that
        no rank hangs.
        """
        iterator = iter(weights)
        if not self._is_master:
            await asyncio.to_thread(drain, iterator)
            return {}
        try:
            return await self._upload(iterator, global_steps)
        except Exception:
            self._table = None
            if other_ranks_gather():
                await asyncio.to_thread(drain, iterator)
            raise

    def receive_weights(self, global_steps: int | None = None) -> SentVersion:
        """Return the number of the version that is being sent."""
        return SentVersion(self._require_version())

    async def _upload(self, iterator: Iterable[Named], global_steps: int | None) -> dict[str, float]:
        version, table = self._require_version(), self._table
        learnt: list[UploadTensor] = []
        began = asyncio.get_running_loop().time()
        async with self._settings.client() as client:
            status = await client.push_weights(
                version,
                iterator if table is not None else described(iterator, learnt),
                tensor_table=table,
                label=None if global_steps is None else f"global_step_{global_steps}",
                quantize=self._settings.quantize,
                timeout_s=self._settings.timeout_s,
            )
        self._table = table or learnt
        took_s = asyncio.get_running_loop().time() - began
        logger.info("version %d (global_steps %s) is loaded, after %.1f s", version, global_steps, took_s)
        return {"rollout_service/version": float(status.version), "rollout_service/update_s": took_s}

    def _require_version(self) -> int:
        if self._version is None:
            raise RuntimeError("no version was agreed on: verl calls prepare and init_process_group before each update")
        return self._version
