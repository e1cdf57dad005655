"""The ingest's side of the KV cache: the scales of each version, and the choice between FP8 and BF16.

The commit of a version decides which scales replicas load, and stores that in the manifest as ``kv_scales_from``.
"""

import asyncio
import logging
import struct
from collections.abc import Mapping

from rollout_service.config import ServiceConfig
from rollout_service.errors import InsufficientStorage, InvalidManifest
from rollout_service.kv_scales.scales import TENSORS
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.runtime.tasks import ClosableLock
from rollout_service.store.log import WeightLog
from rollout_service.store.manifest import Manifest

logger = logging.getLogger(__name__)

_SMALLEST_NORMAL = 2.0**-126
_LARGEST = (2 - 2**-7) * 2.0**127 / 448
"""Largest valid scale: times the largest FP8 code, it is the largest BF16 number. A larger scale would overflow."""


class VersionScales:
    """The scales of each version."""

    def __init__(self, config: ServiceConfig, model: ServedModel) -> None:
        self._policy, self._model, self._no_use = config.kv_cache.scales_policy, model, _no_use(config, model)
        if self._policy == "unit" and self._no_use:
            logger.warning("kv_cache.scales_policy is unit, which has no effect: %s", self._no_use)
        self._newest: dict[str, float] | None = None
        """Scales of the newest version; None: 1 everywhere."""

    def check(self, scales: Mapping[str, float] | None) -> None:
        """Raise InvalidManifest, with every name, unless there are scales for q, k and v of exactly the model's layers.

        A scale is a positive, normal fp32 number, and 448 times the scale must be finite in BF16. None, no scales, is
        valid.
        """
        if scales is None:
            return
        if self._no_use:
            raise InvalidManifest(
                f"the version brings {len(scales)} KV scales, but {self._no_use}: leave kv_scales out"
            )
        expected = {f"{layer}.{x}_scale" for layer in self._model.attention for x in TENSORS}
        wrong = {
            "missing": sorted(expected - scales.keys()),
            "unknown": sorted(scales.keys() - expected),
            "unusable": [f"{name} is {value:g}" for name, value in scales.items() if not _is_scale(value)],
        }
        wrong = {what: names for what, names in wrong.items() if names}
        if wrong:
            summary = "; ".join(f"{len(names)} {what}: {', '.join(names[:4])}" for what, names in wrong.items())
            raise InvalidManifest(
                f"the KV scales do not fit the served model {self._model.name}, where q, k and v of "
                f"{len(self._model.attention)} attention layers have a positive fp32 number each: {summary}",
                wrong,
            )

    def with_scales(self, manifest: Manifest, scales: dict[str, float] | None) -> Manifest:
        """Return the manifest with the scales that came with the version, or as ``scales_policy`` defines."""
        if scales is not None:
            return manifest.replace(kv_scales=scales, kv_scales_from="trainer")
        if self._policy == "reuse" and self._newest is not None and not self._no_use:
            return manifest.replace(kv_scales=self._newest, kv_scales_from="reuse")
        return manifest

    def committed(self, manifest: Manifest) -> None:
        """Note that a version is now the newest."""
        self._newest = manifest.kv_scales


class KVCacheCoordinator:
    """The dtype of all replicas' KV caches, in the ingest."""

    def __init__(self, config: ServiceConfig, log: WeightLog) -> None:
        self._log, self._falls_back = log, config.kv_cache.dtype == "auto"
        self._choosing = ClosableLock()

    def kv_cache_choice(self) -> KVCacheChoice | None:
        """Return the recorded choice for the KV cache; None: it was not measured yet. Raises LogCorrupt."""
        return self._log.kv_cache()

    async def choose_kv_cache(self, choice: KVCacheChoice) -> KVCacheChoice:
        """Store a replica's choice durably, unless there is one already; return the choice for all replicas.

        BF16 that was chosen with ``kv_cache.dtype: auto`` is replaced if FP8 is configured explicitly. Raises
        LogCorrupt, or InsufficientStorage if the disk is full: send it again.
        """
        async with self._choosing:
            known = self._log.kv_cache()
            if known is not None and (self._falls_back or known.dtype == "fp8_e4m3"):
                return known
            logger.info("KV cache: %s, since %s", choice.dtype, choice.why)
            try:
                await asyncio.to_thread(self._log.set_kv_cache, choice)
            except OSError as error:
                raise InsufficientStorage(
                    f"the choice of the KV cache's dtype cannot be kept in {self._log.root}: {error}"
                ) from error
            return choice

    async def close(self) -> None:
        """Finish a running write, and refuse new ones."""
        await self._choosing.close()


def _no_use(config: ServiceConfig, model: ServedModel) -> str | None:
    """Return the reason why this service cannot use KV scales; None: it can."""
    if config.kv_cache.dtype == "bfloat16":
        return "kv_cache.dtype is bfloat16, and a BF16 cache has none"
    if not model.attention:
        return f"{model.name} has no attention layers that take them"
    if config.quant.weights == "none" and config.scaling.on_gpus:
        return "vLLM on a GPU loads them beside FP8 weights only, and quant.weights is none"
    return None


def _is_scale(value: float) -> bool:
    try:
        (as_stored,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:  # finite, but too large for fp32
        return False
    return bool(_SMALLEST_NORMAL <= as_stored <= _LARGEST)
