"""vLLM's scheduler, with shorter decode steps, a complete ``mode=wait``, and ``weights.kv_cache_on_update: keep``.

With ``keep``, sequences keep their KV cache over an update. The ``cache_salt`` of a request begins with the weight
version with which the request began, see ``salted``. Requests share entries of the prefix cache only if their salts are
equal. At an update the scheduler finds the requests whose version is too old. It preempts them and gives them the salt
of the new version, so that they compute their keys and values again. vLLM does the same to all requests when it drops
its cache.

With ``engine.kv_offload_gib``, blocks in host memory have the same salts. A request that is too old while it loads such
blocks is computed again once the load has ended.

This module runs in the engine's process. It uses undocumented names of vLLM, like ``vllm_internals.py``.
"""

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request, RequestStatus

KV_MAX_AGE = "rollout_service_kv_max_age"
"""Key of the first ``weights.kv_max_age`` in vLLM's ``additional_config``."""


def salted(version: int, salt: str | None) -> str:
    """Return the ``cache_salt`` of a request that began with weights of ``version``. ``salt``: the client's own."""
    return str(version) if salt is None else f"{version} {salt}"


def is_too_old(begun: int, version: int, max_age: int | None) -> bool:
    """Return True if a request that began with ``begun`` must compute its keys and values again for ``version``.

    A number above ``version`` is of a log that was replaced. ``max_age``: in versions; None: unbounded.
    """
    return begun > version or (max_age is not None and version - begun > max_age)


async def begin_version(llm: AsyncLLM, version: int, max_age: int | None) -> None:
    """Make the scheduler recompute requests that are too old for ``version``. Call while paused, before its load.

    ``max_age``: see ``is_too_old``. It holds until the next call.

    vLLM passes the arguments of ``reset_prefix_cache`` to the scheduler unchanged, and has no other method that does.
    """
    await llm.reset_prefix_cache(reset_running_requests=[version, max_age])


def make_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """Return the engine's scheduler; vLLM calls this as its ``scheduler_cls``."""
    keeps = KV_MAX_AGE in vllm_config.additional_config
    if vllm_config.scheduler_config.async_scheduling:
        chosen = KeepingAsyncScheduler if keeps else DrainingAsyncScheduler
    else:
        chosen = KeepingScheduler if keeps else DrainingScheduler
    scheduler = chosen(vllm_config=vllm_config, **arguments)
    shorten_decode_steps(scheduler.kv_cache_manager)
    return scheduler


def shorten_decode_steps(manager: KVCacheManager) -> None:
    """Make the manager return at once for a sequence whose next token fits into its last block.

    vLLM looks for blocks to free, to allocate and to cache with each token of each sequence, although only a token
    that begins or fills a block changes any. Only for caches of full attention alone: others free blocks in between.
    """
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return
    [blocks] = managers
    size = blocks.block_size
    if size != manager.block_pool.hash_block_size:  # vLLM caches parts of blocks, too
        return
    allocate_slots, cache_blocks = manager.allocate_slots, manager.cache_blocks
    cached, owned = blocks.num_cached_block, blocks.req_to_blocks

    def allocate_new_slots(
        request: Request, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **others: Any
    ) -> KVCacheBlocks | None:
        name = request.request_id
        if num_new_tokens == 1 and not num_lookahead_tokens and not others and name in cached:
            tokens = request.num_computed_tokens + 1
            if tokens <= len(owned[name]) * size and tokens // size <= cached[name]:
                return manager.empty_kv_cache_blocks
        return allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **others)

    def cache_full_blocks(request: Request, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > cached.get(request.request_id, 0):
            cache_blocks(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_new_slots, cache_full_blocks


class DrainingScheduler(Scheduler):  # type: ignore[misc]  # vLLM's class is untyped here
    """A scheduler that in ``PAUSED_NEW``, which is ``mode=wait``, also finishes preempted requests.

    vLLM then runs and counts only what is in ``running`` and ``kv_holding_waiting``. It puts preempted requests into
    ``waiting``, together with new ones.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, after preempted requests were put where vLLM runs them."""
        preempted = self._left_out()
        # behind one that waits for memory, a request with blocks would neither run nor free them
        if preempted and not any(map(self._holds_kv_blocks, self.kv_holding_waiting)):
            self.waiting.remove_requests(preempted)
            for request in preempted:
                self.kv_holding_waiting.add_request(request)
        return super().schedule(throttle_prefills)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests for which the engine must step: ``mode=wait`` lasts until it is 0."""
        unfinished: int = super().get_num_unfinished_requests()
        return unfinished + len(self._left_out())

    def _left_out(self) -> list[Request]:
        """Return the preempted requests that vLLM neither runs nor counts in this pause, in order of arrival."""
        if self.pause_state != PauseState.PAUSED_NEW:
            return []
        runs = set(self.kv_holding_waiting)
        preempted = RequestStatus.PREEMPTED
        return [each for each in self.requests.values() if each.status == preempted and each not in runs]


class DrainingAsyncScheduler(DrainingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling, which vLLM uses on GPUs."""


class KeepingScheduler(DrainingScheduler):
    """A scheduler that recomputes only the requests whose keys and values are too old, or whose prompts are scored."""

    def __init__(self, vllm_config: VllmConfig, **arguments: Any) -> None:
        super().__init__(vllm_config=vllm_config, **arguments)
        settings: Any = vllm_config.additional_config
        self._max_age: int | None = settings[KV_MAX_AGE]
        self._version: int | None = None

    def add_request(self, request: Request) -> None:
        """Add a request. If it was sent before an update and arrives afterwards, it may be too old already."""
        if self._is_too_old(request):
            self._renew_salt(request)
        super().add_request(request)

    def reset_prefix_cache(
        self, reset_running_requests: bool | list[Any] = False, reset_connector: bool = False
    ) -> bool:
        """Drop the cache as vLLM does, or recompute the requests that are too old for a version.

        ``reset_running_requests``: vLLM's bool, or the arguments of ``begin_version``.
        """
        if isinstance(reset_running_requests, bool):
            if reset_running_requests:
                for request in self.requests.values():
                    self._discard_load(request)
            was_reset: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
            return was_reset
        self._version, self._max_age = reset_running_requests
        too_old = {name for name, each in self.requests.items() if not each.is_finished() and self._is_too_old(each)}
        now = time.monotonic()
        # vLLM's order: the last one first, since each is put at the front of the waiting queue
        for request in [each for each in reversed(self.running) if each.request_id in too_old or _scores_prompt(each)]:
            self.running.remove(request)
            self._preempt_request(request, now, drop_stale_output=True)
            if self.log_stats:
                request.events.pop()  # in vLLM's statistics the preemption would look like a lack of memory
            # the request may resume in the next step, as if it had not been in the last one
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        for name in too_old:
            self._discard_load(self.requests[name])
            self._renew_salt(self.requests[name])
        return True

    def _is_too_old(self, request: Request) -> bool:
        if self._version is None:
            return False
        if request.cache_salt is None:  # of no rollout: such a request is recomputed at every update
            return True
        return is_too_old(int(request.cache_salt.partition(" ")[0]), self._version, self._max_age)

    def _renew_salt(self, request: Request) -> None:
        if request.cache_salt is None or self._version is None:
            return
        _, _, own = request.cache_salt.partition(" ")
        request.cache_salt = salted(self._version, own or None)
        request.block_hashes.clear()
        request.update_block_hashes()
        if isinstance(self.connector, KeepingOffloadingConnector):
            self.connector.renew_keys(request)

    def _discard_load(self, request: Request) -> None:
        """Free the blocks that a waiting request has loaded, or is loading: then once the load has ended.

        The request is computed again, as after a load that failed.
        """
        waits = not request.is_finished() and request.status != RequestStatus.RUNNING
        if not waits or not self._holds_kv_blocks(request):
            return
        name = request.request_id
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:  # the load has ended, but there was no room to run
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.finished_recving_kv_req_ids.add(name)
        request.num_computed_tokens = 0  # else vLLM would cache the blocks, with the new salt
        self.failed_recving_kv_req_ids.add(name)
        self._inflight_prefills.discard(request)  # else the request would wait for twice its blocks
        if self._handle_blocked_waiting_request(request):  # the load has ended: the blocks are free now
            self.kv_holding_waiting.remove_request(request)
            self.waiting.prepend_request(request)


def _scores_prompt(request: Request) -> bool:
    """Return True if some of the prompt's logprobs are yet to be computed: all of them must be of one version."""
    sampling = request.sampling_params
    wants_logprobs = sampling is not None and sampling.prompt_logprobs is not None
    return wants_logprobs and request.num_computed_tokens < request.num_prompt_tokens


class KeepingAsyncScheduler(KeepingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling, which vLLM uses on GPUs."""


class KeepingOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's offloading of KV cache blocks to host memory, for requests whose salt may change."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> None:
        """Return None: blocks are copied as they are, in the layout that the attention kernels prefer."""

    def renew_keys(self, request: Request) -> None:
        """Forget the keys of a request's blocks in host memory, which vLLM computes once from the block hashes."""
        state = self.scheduler._req_status.get(request.request_id)
        if state is None:  # not added yet
            return
        state.req_context._offload_key_positions.clear()
        for group in state.group_states:
            group.offload_keys.clear()
            group.next_stored_chunk_idx = group.num_hit_chunks = 0
