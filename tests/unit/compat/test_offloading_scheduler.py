"""The scheduler that keeps the KV cache over updates, with vLLM's offloading to host memory and a pretended worker.

The worker has no tensors. It notes which tokens each slot of the KV cache was computed from, and with which version.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata, TransferJob
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rollout_service.compat.vllm_scheduler import KV_MAX_AGE, KeepingOffloadingConnector, is_too_old, salted
from tests.unit.compat.schedulers import BLOCK, request_of, scheduler_of

GPU_BLOCKS, HOST_BLOCKS, PAGE = 20, 80, 4096
LENGTH = 256
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
Slot = tuple[int, int]
"""The hash of the tokens up to a position, and the version that computed its keys and values."""


def vllm_config(model: Path, is_async: bool, gpu_blocks: int = GPU_BLOCKS) -> VllmConfig:
    offloading = KVTransferConfig(
        kv_connector=KeepingOffloadingConnector.__qualname__,
        kv_connector_module_path=KeepingOffloadingConnector.__module__,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": HOST_BLOCKS * PAGE, "offload_prompt_only": False},
    )
    args = EngineArgs(
        model=str(model),
        max_model_len=LENGTH,
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=2 * BLOCK,
        async_scheduling=is_async,
        kv_transfer_config=offloading,
        scheduling_policy="priority",
        additional_config={KV_MAX_AGE: 0},
    )
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = gpu_blocks
    return config


@dataclass
class Engine:
    """A real scheduler, and the worker."""

    config: VllmConfig
    seed: int | None = None
    """Transfers end at random times; None: only in ``transfer``, and stores at once."""
    version: int = 1
    max_age: int | None = 0
    loaded: int = 0
    """Number of blocks that were loaded from host memory."""
    made: dict[str, list[int]] = field(default_factory=dict)
    """Request → its tokens, in the order in which the worker computes them."""
    finished: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = scheduler_of(self.config, self.config.cache_config.num_gpu_blocks)
        self.random = random.Random(self.seed)
        self._gpu: dict[int, list[Slot | None]] = {}
        self._host: dict[int, list[Slot | None]] = {}
        self._unsubmitted: dict[int, TransferJob] = {}
        self._stores: dict[int, TransferJob] = {}
        self._loads: dict[int, TransferJob] = {}
        self._ended = OffloadingWorkerMetadata()
        self._received: set[str] = set()
        self._outputs: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.begin_version(self.version)

    def add(self, name: str, prompt: list[int], begun: int | None = None, max_tokens: int = 20) -> Request:
        request = request_of(name, prompt, salted(self.version if begun is None else begun, None), max_tokens)
        self.made[name] = list(prompt)
        self.scheduler.add_request(request)
        return request

    def begin_version(self, version: int) -> None:
        self.version = version
        assert self.scheduler.reset_prefix_cache([version, self.max_age])

    def update(self, pause: PauseState = PauseState.PAUSED_ALL) -> None:
        """Pause as vLLM's engine does, and begin the next version."""
        self.scheduler.set_pause_state(pause)
        while self.scheduler.has_requests() or self._outputs:
            self.step()
        if pause == PauseState.PAUSED_NEW:
            assert {each.status for each in self.scheduler.requests.values()} <= {RequestStatus.WAITING}
        self.begin_version(self.version + 1)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def step(self) -> dict[str, int]:
        """Return the number of tokens that each request computes in a step."""
        scheduled = self.scheduler.schedule()
        meta = scheduled.kv_connector_metadata
        flushed = {job: meta.store_jobs.pop(job) for job in meta.jobs_to_flush if job in meta.store_jobs}
        self._stores |= self._unsubmitted | flushed
        self._unsubmitted = {}
        for job in meta.jobs_to_flush & self._stores.keys():
            self._store(job)
        sampled = [self._compute(name, count) for name, count in scheduled.num_scheduled_tokens.items()]
        self._loads |= meta.load_jobs
        self._unsubmitted = meta.store_jobs
        self._end_transfers()
        ended = KVConnectorOutput(finished_recving=self._received, kv_connector_worker_meta=self._ended)
        self._received, self._ended = set(), OffloadingWorkerMetadata()
        names = list(scheduled.num_scheduled_tokens)
        places = {name: at for at, name in enumerate(names)}
        output = ModelRunnerOutput(names, places, sampled, kv_connector_output=ended)
        self._outputs.append((scheduled, output))
        # with asynchronous scheduling, the next step is scheduled before
        if not self.config.scheduler_config.async_scheduling or not names or len(self._outputs) > 1:
            self._deliver()
        return dict(scheduled.num_scheduled_tokens)

    def _deliver(self) -> None:
        scheduled, output = self._outputs.popleft()
        for made in self.scheduler.update_from_output(scheduled, output).values():
            self.finished |= {each.request_id for each in made.outputs if each.finish_reason is not None}

    def _compute(self, name: str, count: int) -> list[int]:
        """Check the slots that some tokens read, write their own, and return the token sampled after the last one."""
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        begun = int(request.cache_salt.partition(" ")[0])
        assert not is_too_old(begun, self.version, self.max_age)
        tokens, [blocks] = self.made[name], self.scheduler.kv_cache_manager.get_block_ids(name)
        for position in range(end):
            slots = self._gpu.setdefault(blocks[position // BLOCK], [None] * BLOCK)
            prefix = hash(tuple(tokens[: position + 1]))
            if position >= end - count:
                slots[position % BLOCK] = prefix, self.version
            found = slots[position % BLOCK]
            assert found is not None and found[0] == prefix, f"{name} reads the slots of other tokens at {position}"
            assert found[1] >= begun, f"{name} of version {begun} reads what {found[1]} computed at {position}"
        if end < len(tokens):
            return []
        tokens.append(hash(tuple(tokens)) % 90 + 5)
        return [tokens[-1]]

    def _end_transfers(self) -> None:
        """Copy as late as possible: at the end of a random number of transfers, in their order."""
        stores, loads = list(self._stores), list(self._loads)
        some = (len(stores), 0) if self.seed is None else map(self.random.randint, (0, 0), (len(stores), len(loads)))
        ended_stores, ended_loads = some
        for job in stores[:ended_stores]:
            self._store(job)
        for job in loads[:ended_loads]:
            self._load(job)

    def transfer(self) -> None:
        """End all loads; the scheduler learns of it with the next step."""
        for job in list(self._loads):
            self._load(job)

    def _store(self, number: int) -> None:
        job = self._stores.pop(number)
        for source, target in zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True):
            self._host[target] = list(self._gpu[source])
        self._ended.mark_completed(number)

    def _load(self, number: int) -> None:
        job = self._loads.pop(number)
        for source, target in zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True):
            self._gpu[target] = list(self._host[source])
            self.loaded += 1
        self._ended.mark_completed(number)
        self._received.add(job.req_id)

    def finish(self, *names: str) -> None:
        while not self.finished >= {*names}:
            self.step()

    def forget(self) -> None:
        """Empty the GPU's prefix cache alone; nothing may run."""
        while self.scheduler.has_requests():
            self.step()
        assert self.scheduler.reset_prefix_cache(False, False)


PROMPT = [5 + 7 * at % 90 for at in range(3 * BLOCK + 4)]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def gpu_blocks() -> int:
    return GPU_BLOCKS


@pytest.fixture
def engine(tiny_model: Path, is_async: bool, gpu_blocks: int) -> Engine:
    """An engine whose host memory has the blocks of ``PROMPT`` with version 1, and whose GPU has none."""
    engine = Engine(vllm_config(tiny_model, is_async, gpu_blocks))
    engine.add("first", PROMPT)
    engine.finish("first")
    engine.forget()
    return engine


def test_request_of_the_same_version_loads_blocks(engine):
    request = engine.add("second", PROMPT)
    engine.step()
    assert request.status == LOADING
    engine.transfer()
    engine.finish("second")
    assert engine.loaded == 3


def test_request_of_a_newer_version_loads_nothing(engine):
    engine.begin_version(2)
    engine.add("fresh", PROMPT)
    assert engine.step() == {"fresh": 2 * BLOCK}


@pytest.mark.parametrize("when", ["during the load", "after the load", "before it runs"])
def test_too_old_load_is_computed_again(engine, when):
    request, free = engine.add("old", PROMPT), engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    before = free()
    engine.step()
    assert request.status == LOADING and free() == before - 3
    if when != "during the load":
        engine.transfer()
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while engine.scheduler.has_requests():
            engine.step()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert request.status == LOADING
    if when == "before it runs":
        assert engine.scheduler._handle_blocked_waiting_request(request)
        assert request.status == RequestStatus.WAITING and request.num_computed_tokens == 3 * BLOCK
    engine.begin_version(2)
    if when == "during the load":
        assert engine.step() == {} and request.status == LOADING and free() == before - 3
        engine.transfer()
        assert engine.step() == {}
    else:
        assert free() == before
    assert request.cache_salt == "2"
    assert engine.step() == {"old": 2 * BLOCK}  # nothing was cached with the new salt
    engine.finish("old")
    engine.forget()
    engine.add("again", PROMPT)
    engine.step()
    engine.transfer()
    engine.finish("again")
    assert engine.loaded == 6  # the blocks of version 2, which ``_compute`` has checked


def test_renewed_request_stores_blocks_with_its_new_salt(engine):
    engine.max_age = 1
    request = engine.add("long", [*PROMPT[::-1], *PROMPT], max_tokens=40)
    for _ in range(5):
        engine.step()
    engine.update()
    assert engine.step() == {"long": 1}  # it is kept once
    engine.update()
    assert engine.step() == {"long": 2 * BLOCK} and request.cache_salt == "3"
    engine.finish("long")
    engine.forget()
    prompt = engine.made["long"][: 7 * BLOCK + 2]
    engine.add("other", prompt, begun=1)  # renewed, too
    engine.step()
    engine.transfer()
    engine.finish("other")
    assert engine.loaded == 7


def test_full_reset_drops_loads_and_host_memory(engine):
    request = engine.add("loads", PROMPT)
    engine.step()
    engine.transfer()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while engine.scheduler.has_requests():
        engine.step()
    assert request.status == LOADING
    assert engine.scheduler.reset_prefix_cache(True, True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step() == {"loads": 2 * BLOCK}
    engine.finish("loads")


@pytest.mark.parametrize("gpu_blocks", [9])
def test_wait_runs_what_loads_before_a_preempted_request_that_needs_its_blocks(engine):
    preempted, loads = engine.add("long", PROMPT[::-1], max_tokens=80), engine.add("loads", PROMPT)
    while loads.status != LOADING:
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    while not preempted.num_preemptions:
        engine.step()
    for _ in range(150):
        engine.step()
        engine.transfer()
    assert engine.finished == {"first", "long", "loads"}


@pytest.mark.parametrize("max_age", [0, 1, None])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_read_no_keys_of_older_versions(tiny_model, is_async, max_age, seed):
    """Sessions that overflow the GPU's blocks, with updates at random steps. ``_compute`` checks what they read."""
    engine = Engine(vllm_config(tiny_model, is_async), seed, max_age=max_age)
    pick = engine.random
    prompts = {name: [*PROMPT[:BLOCK], *(pick.randrange(5, 95) for _ in range(40))] for name in "abcdef"}
    turns, begun, running = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 1), dict[str, str]()
    while engine.version < 50:
        for name in sorted(prompts.keys() - running.keys()):
            turns[name] += 1
            if is_too_old(begun[name], engine.version, max_age):
                begun[name] = engine.version
            running[name] = f"{name}{turns[name]}"
            engine.add(running[name], prompts[name], begun[name], max_tokens=pick.randrange(1, 30))
        engine.step()
        if pick.random() < 0.05:
            engine.update(PauseState.PAUSED_NEW if engine.version % 3 == 0 else PauseState.PAUSED_ALL)
        if pick.random() < 0.02:
            engine.scheduler.finish_requests(gone := running[pick.choice([*running])], RequestStatus.FINISHED_ABORTED)
            engine.finished.add(gone)
        for name, request in list(running.items()):
            if request in engine.finished:
                del running[name]
                tokens = engine.made[request]
                prompts[name] = [*tokens, *(pick.randrange(5, 95) for _ in range(pick.randrange(20)))]
                if len(prompts[name]) > LENGTH - 40:
                    prompts[name] = prompts[name][: BLOCK + 8]
    assert engine.loaded > 50
