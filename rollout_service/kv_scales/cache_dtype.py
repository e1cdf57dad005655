"""Which dtype a replica's KV cache has: what is configured, what was chosen before, or what the first replica finds."""

import logging
from typing import Any

from rollout_service.config import ServiceConfig
from rollout_service.errors import KVCacheUnfit
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.fleet import KVCacheChoice
from rollout_service.rpc import ask

logger = logging.getLogger(__name__)


def chosen_before(dtype: str, model: ServedModel, known: KVCacheChoice | None) -> KVCacheChoice | None:
    """The dtype that a replica starts with; None: FP8, and the replica measures whether that is accurate enough.

    Args:
        dtype: ``kv_cache.dtype``.
        known: what an earlier replica found. BF16, found for ``auto``, does not hold where FP8 is asked for by name.
    """
    if dtype == "bfloat16":
        return KVCacheChoice(dtype="bfloat16", why="kv_cache.dtype says so")
    if not model.attention:
        why = "latent attention keeps neither keys nor values, and what FP8 costs it is not measured"
        return KVCacheChoice(dtype="bfloat16" if dtype == "auto" else "fp8_e4m3", why=why)
    return None if known is not None and known.dtype != "fp8_e4m3" and dtype != "auto" else known


async def fallen_back(ingest: Any, unfit: KVCacheUnfit) -> KVCacheChoice:
    """BF16, noted for all replicas of this log. ``ingest``: handle of its deployment. Raises what asking it raises."""
    logger.warning("the KV cache is kept in BF16: %s", unfit.message)
    choice = KVCacheChoice(dtype="bfloat16", why=unfit.message, judged_by=unfit.detail["judged_by"])
    held: KVCacheChoice = await ask(ingest, "choose_kv_cache", choice)
    return held


def with_kv_cache(config: ServiceConfig, choice: KVCacheChoice) -> ServiceConfig:
    """The configuration of an engine with the chosen cache."""
    policy = config.kv_cache.scales_policy if choice.dtype == "fp8_e4m3" else "unit"
    kv_cache = config.kv_cache.model_copy(update={"dtype": choice.dtype, "scales_policy": policy})
    return config.model_copy(update={"kv_cache": kv_cache})
