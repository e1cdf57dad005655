"""Which versions' keys and values the requests of an engine read."""

from pathlib import Path
from typing import Any

import pytest
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_service.compat.vllm_scheduler import KV_MAX_AGE, is_too_old
from rollout_service.engine import kv_versions
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.kv_versions import KVVersions
from rollout_service.protocol.rollout import Completion
from tests.unit.fleet.completions import completion_of


def sampled(*versions: int) -> Completion:
    """A completion with one token of each version."""
    return completion_of(range(len(versions)), *((version, 1) for version in versions), end="length")


def kv_from(kv: KVVersions, name: str, *versions: int) -> list[int | None]:
    [made] = kv.on(name, [sampled(*versions)])
    return [span.kv_from for span in made.spans]


def test_salt_names_the_version_and_keeps_the_clients_salt():
    kv = KVVersions(None)
    kv.load(5, is_empty=True)
    with kv.follow("a", None, None) as own, kv.follow("b", None, "7 of mine") as combined:
        assert (own, combined) == ("5", "5 7 of mine")
    kv.load(6, is_empty=False)
    with kv.follow("c", None, "7 of mine") as salt:
        assert salt == "6 7 of mine"


@pytest.mark.parametrize(
    ("max_age", "expected"), [(None, [None, 1, 1, 1]), (4, [None, 1, 1, None]), (0, [None, None, None, None])]
)
def test_request_beyond_the_bound_reads_the_new_version(max_age, expected):
    kv, versions = KVVersions(max_age), (1, 2, 5, 6)  # an age counts numbers, not updates
    kv.load(versions[0], is_empty=True)
    with kv.follow("a", None, None):
        for version in versions[1:]:
            kv.load(version, is_empty=False)
        assert kv_from(kv, "a", *versions) == expected


def test_session_keeps_its_version_until_it_is_too_old():
    kv = KVVersions(1)
    kv.load(1, is_empty=True)
    salts = []
    for version in (1, 2, 3, 4):
        kv.load(version, is_empty=False)
        with kv.follow("turn", "s", None) as salt:
            salts.append((salt, kv_from(kv, "turn", version)))
    assert salts == [("1", [None]), ("1", [1]), ("3", [None]), ("3", [3])]


def test_recomputed_turn_gives_its_session_the_new_version():
    kv = KVVersions(1)
    kv.load(1, is_empty=True)
    with kv.follow("turn", "s", None):
        kv.load(3, is_empty=False)
    kv.load(4, is_empty=False)
    with kv.follow("next", "s", None) as salt:
        assert salt == "3"


def test_dropped_cache_makes_older_salts_new():
    kv = KVVersions(None)
    kv.load(1, is_empty=True)
    with kv.follow("a", "s", None):
        kv.load(2, is_empty=True)
        kv.load(3, is_empty=False)
        assert kv_from(kv, "a", 1, 2, 3) == [None, None, 2]
        kv.emptied()
        kv.load(4, is_empty=False)
        with kv.follow("b", "s", None) as salt:
            assert salt == "1" and kv_from(kv, "b", 4) == kv_from(kv, "a", 4) == [3]


def test_cache_dropped_within_a_version_keeps_the_lower_bound():
    kv = KVVersions(None)
    kv.load(1, is_empty=True)
    with kv.follow("a", None, None):
        kv.load(2, is_empty=False)
        kv.emptied()
        assert kv_from(kv, "a", 1, 2) == [None, 1]  # its tokens of version 2 are from before and after the drop


def test_numbers_that_go_down_are_of_another_log():
    assert is_too_old(9, 3, None) and not is_too_old(3, 3, None)
    kv = KVVersions(None)
    kv.load(9, is_empty=True)
    with kv.follow("a", "s", None):
        kv.load(3, is_empty=True)
        kv.load(9, is_empty=False)
        assert kv_from(kv, "a", 3, 9) == [None, 3]
    with kv.follow("b", "s", None) as salt:
        assert salt == "3"


def test_forgotten_session_begins_anew(monkeypatch):
    monkeypatch.setattr(kv_versions, "MAX_SESSIONS", 2)
    kv = KVVersions(None)
    for version, session in enumerate(("old", "used", "used", "new"), start=1):
        kv.load(version, is_empty=False)
        with kv.follow("a", session, None):
            pass
    kv.load(9, is_empty=False)
    begun = []
    for session in ("used", "old"):
        with kv.follow("a", session, None) as salt:
            begun.append(salt)
    assert begun == ["2", "9"]
    made = sampled(1)
    assert kv.on("gone", [made]) == (made,)


class LLM:
    """Stands in for vLLM's client, and notes which requests a reset of the cache recomputes."""

    errored = False

    def __init__(self) -> None:
        self.engine_core = self
        self.resets: list[Any] = []

    async def reset_prefix_cache(self, reset_running_requests: Any, reset_connector: bool = False) -> None:
        self.resets.append(reset_running_requests)

    async def is_paused(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    pause_scheduler_async = abort = start_weight_update = update_weights = finish_weight_update = is_paused


async def test_a_wait_fills_the_cache_that_a_pause_has_dropped(monkeypatch):
    llm = LLM()
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda *_, **__: llm)
    engine = EngineAdapter(AsyncEngineArgs(model="any", additional_config={KV_MAX_AGE: None}), exports=False)
    kv = engine._kv
    assert kv is not None
    await engine.load(Path("1"), 1)
    with kv.follow("turn", "s", None):
        await engine.pause("keep")
        await engine.pause("wait", clear_cache=False)
    await engine.load(Path("2"), 2, keep_cache=True)
    with kv.follow("next turn", "s", None):
        assert kv_from(kv, "next turn", 2) == [1]
    await engine.pause("keep")
    await engine.pause("wait", clear_cache=False)
    await engine.load(Path("3"), 3)
    assert llm.resets == [True, [1, None], [2, None], True, [3, None]]
