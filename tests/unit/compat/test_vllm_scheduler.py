"""The scheduler of engines, which may keep the KV cache over updates, without an engine around it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rollout_service.compat.vllm_scheduler import (
    KV_MAX_AGE,
    KeepingAsyncScheduler,
    KeepingScheduler,
    make_scheduler,
    salted,
)
from tests.unit.compat.schedulers import BLOCK, request_of, scheduler_of

PROMPT = list(range(5, 5 + 70))


@pytest.fixture(scope="module")
def vllm_config(tiny_model: Path) -> VllmConfig:
    settings = {"max_model_len": 256, "block_size": BLOCK, "additional_config": {KV_MAX_AGE: 1}}
    return EngineArgs(model=str(tiny_model), scheduling_policy="priority", **settings).create_engine_config()


class Steps:
    """A scheduler, and what a model would answer."""

    def __init__(
        self, config: VllmConfig, is_async: bool, make: Callable[..., Scheduler] = make_scheduler, blocks: int = 100
    ) -> None:
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = blocks
        self.is_async = is_async
        self.scheduler = scheduler_of(config, blocks, make)

    def add(self, name: str, salt: str | None, prompt: list[int] = PROMPT) -> Request:
        request = request_of(name, prompt, salt)
        self.scheduler.add_request(request)
        return request

    def begin(self, version: int, max_age: int | None = 1) -> None:
        assert self.scheduler.reset_prefix_cache([version, max_age])

    def step(self) -> dict[str, int]:
        """Return the number of tokens that each request computes in a step, after which it samples one."""
        scheduled = self.scheduler.schedule()
        self.finish(scheduled)
        return dict(scheduled.num_scheduled_tokens)

    def finish(self, scheduled: SchedulerOutput, token: int = 9) -> None:
        names = list(scheduled.num_scheduled_tokens)
        places = {name: at for at, name in enumerate(names)}
        self.scheduler.update_from_output(scheduled, ModelRunnerOutput(names, places, [[token] for _ in names]))

    def drain(self) -> None:
        """Do ``mode=wait`` as vLLM's engine does, which schedules a step before the last one has finished if async."""
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        under_way = list[SchedulerOutput]()
        for _ in range(300):
            if self.scheduler.has_requests():
                under_way.append(self.scheduler.schedule())
            elif not under_way:
                return
            if len(under_way) > self.is_async or not under_way[-1].num_scheduled_tokens:
                self.finish(under_way.pop(0))
        raise AssertionError("the wait does not end")

    def blocks(self) -> Any:
        """Return each request's blocks, the blocks that the prefix cache knows, and the number of free ones."""
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        known = {block.block_id: block.block_hash for block in pool.blocks if block.block_hash is not None}
        held = {name: manager.get_block_ids(name) for name in self.scheduler.requests}
        return held, known, pool.get_num_free_blocks()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def steps(request: pytest.FixtureRequest, vllm_config: VllmConfig) -> Steps:
    return Steps(vllm_config, request.param)


def test_class_follows_vllms_choice(vllm_config):
    assert type(Steps(vllm_config, False).scheduler) is KeepingScheduler
    assert type(Steps(vllm_config, True).scheduler) is KeepingAsyncScheduler


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_is_vllms_own(vllm_config, is_async, seed):
    """With so few blocks that requests are preempted; some share their prompts, some are aborted."""
    ours = Steps(vllm_config, is_async, blocks=17)
    vllms = Steps(vllm_config, is_async, AsyncScheduler if is_async else Scheduler, blocks=17)
    chance = random.Random(seed)
    under_way = list[tuple[SchedulerOutput, SchedulerOutput]]()
    preempted = 0
    for number in range(300):
        event = chance.random()
        name = f"request {number}"
        if event < 0.1:
            prompt = PROMPT[: chance.randint(1, 70)] + [chance.randint(0, 3)] * chance.randint(1, 30)
            for each in (ours, vllms):
                each.add(name, None, prompt)
        elif event < 0.12 and ours.scheduler.requests:
            aborted = chance.choice(list(ours.scheduler.requests))
            for each in (ours, vllms):
                each.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        scheduled = ours.scheduler.schedule(), vllms.scheduler.schedule()
        preempted += len(scheduled[0].preempted_req_ids or ())
        assert scheduled[0] == scheduled[1]
        assert ours.blocks() == vllms.blocks()
        under_way.append(scheduled)
        if len(under_way) > is_async:
            first = under_way.pop(0)
            token = chance.randint(0, 3)
            ours.finish(first[0], token)
            vllms.finish(first[1], token)
            assert ours.blocks() == vllms.blocks()
    assert preempted


def test_tokens_within_a_block_ask_for_no_blocks(vllm_config, monkeypatch):
    monkeypatch.setattr(vllm_config, "additional_config", {})
    steps = Steps(vllm_config, is_async=True)
    asked = 0
    allocate = steps.scheduler.kv_cache_manager.coordinator.allocate_new_blocks

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return allocate(*arguments)

    monkeypatch.setattr(steps.scheduler.kv_cache_manager.coordinator, "allocate_new_blocks", counted)
    steps.add("a", None, list(range(BLOCK)))
    for _ in range(1 + BLOCK):
        steps.step()
    assert asked == 2 + 1  # the prompt, the token that begins a block, and the token that fills it


def test_only_requests_beyond_the_bound_are_recomputed(steps):
    steps.begin(1)
    old = steps.add("old", salted(1, "mine"))
    assert steps.step() == {"old": 70}
    steps.begin(2)
    new = steps.add("new", salted(2, "mine"))
    assert steps.step() == {"old": 1, "new": 70}
    steps.begin(3)
    assert steps.step() == {"old": 72, "new": 1}
    assert (old.cache_salt, new.cache_salt) == ("3 mine", "2 mine")
    assert old.num_output_tokens == 3 and new.num_output_tokens == 2


def test_bound_may_change_with_each_version(steps):
    steps.begin(1)
    request = steps.add("a", "1")
    steps.step()
    steps.begin(3, max_age=None)
    assert steps.step() == {"a": 1} and request.cache_salt == "1"
    steps.begin(4, max_age=2)
    assert steps.step() == {"a": 72} and request.cache_salt == "4"
    steps.begin(2)  # of a log that was replaced
    assert request.cache_salt == "2"


def test_waiting_and_late_requests_get_the_new_salt(steps):
    steps.begin(1)
    waiting = steps.add("waiting", "1")
    steps.begin(3)
    late, kept = steps.add("late", "1 mine"), steps.add("kept", "2")
    assert [each.cache_salt for each in (waiting, late, kept)] == ["3", "3 mine", "2"]
    assert waiting.block_hashes != kept.block_hashes and len(waiting.block_hashes) == len(kept.block_hashes) == 2


def test_renewed_requests_share_their_prefix_again(steps):
    steps.begin(1)
    for name in ("a", "b"):
        steps.add(name, "1")
    steps.step()
    steps.begin(9)
    assert sorted(steps.step().values()) == [71 - 2 * BLOCK, 71]
    steps.add("c", "9")
    assert steps.step()["c"] == 70 - 2 * BLOCK


def test_requests_without_a_version_are_recomputed_at_each_update(steps):
    steps.begin(1)
    steps.add("score", None)
    steps.step()
    steps.begin(2)
    # the blocks of its prompt have the same hash, so only a request that reads no prefix cache may have no version
    assert steps.step()["score"] > 1


def test_vllms_own_reset_drops_everything(steps):
    steps.begin(1)
    steps.add("a", "1")
    steps.step()
    assert steps.scheduler.reset_prefix_cache(True, True)
    assert steps.step() == {"a": 71}


@pytest.fixture(params=[True, False], ids=["keep", "drop"])
def short_steps(request: pytest.FixtureRequest, steps: Steps, vllm_config: VllmConfig, monkeypatch) -> Steps:
    """Three running requests of a cache that has room for two of them."""
    if not request.param:
        monkeypatch.setattr(vllm_config, "additional_config", {})
    short = Steps(vllm_config, steps.is_async, blocks=9)
    for name in "abc":
        short.add(name, None, [ord(name)] * 50)
    for _ in range(10):
        assert short.step().keys() == set("abc")
    return short


@pytest.mark.parametrize("clears", [True, False])
def test_wait_finishes_what_a_pause_holds(short_steps, clears):
    short_steps.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    if clears:
        short_steps.scheduler.reset_prefix_cache(True, True)
    new = short_steps.add("new", None)
    short_steps.drain()
    assert short_steps.scheduler.requests == {"new": new} and new.status == RequestStatus.WAITING
    short_steps.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert short_steps.step() == {"new": 70}


def test_wait_finishes_what_it_preempts(short_steps):
    requests = dict(short_steps.scheduler.requests)
    short_steps.drain()
    assert any(each.num_preemptions for each in requests.values()) and not short_steps.scheduler.requests
    assert {each.num_output_tokens for each in requests.values()} == {50}


def test_preempted_requests_of_a_wait_can_be_held_resumed_and_aborted(short_steps):
    scheduler = short_steps.scheduler
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    preempted = scheduler.requests["c"]
    while not preempted.num_preemptions:
        short_steps.step()
    assert short_steps.step().keys() == set("ab") and scheduler.get_num_unfinished_requests() == 3
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert short_steps.step() == {} and not scheduler.has_requests()
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert short_steps.step().keys() == set("ac")
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.reset_prefix_cache(True, True)
    assert scheduler.get_num_unfinished_requests() == 2
    scheduler.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.get_num_unfinished_requests() == 0 and not scheduler.requests
