"""vLLM's real scheduler without an engine around it."""

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rollout_service.compat.vllm_scheduler import make_scheduler

BLOCK = 32


def scheduler_of(config: VllmConfig, blocks: int, make: Callable[..., Scheduler] = make_scheduler) -> Scheduler:
    """Return a scheduler of a cache of so many blocks, with one layer of full attention."""
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    return make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def request_of(name: str, prompt: list[int], salt: str | None, max_tokens: int = 50) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, None, cache_salt=salt, block_hasher=get_request_block_hasher(BLOCK, sha256))
