"""How many sequences a replica holds, and which turns of sessions it admits, by the tokens of older sessions."""

from contextlib import AbstractContextManager, ExitStack

import pytest

from rollout_service.engine.admission import (
    DECREASE,
    DECREASE_PERIOD_S,
    INCREASE_PER_S,
    MIN_SHARE,
    WAITING_S,
    AdmissionLimit,
    SessionAdmission,
    SessionTurn,
)
from rollout_service.errors import KVCacheFull, Overloaded
from rollout_service.protocol.rollout import FinishReason
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.support.clock import Clock
from tests.unit.fleet.completions import completion_of

CAPACITY = 1000


def test_a_full_replica_refuses_with_the_numbers_and_one_free_place_takes_any_request():
    limit = AdmissionLimit(10)
    with limit.admit(9), limit.admit(4096):
        with pytest.raises(Overloaded, match="4105 of 10 sequences and 3 more") as refused, limit.admit(3):
            pass
        assert refused.value.detail == {"running": 4105, "limit": 10, "asked": 3}
        assert refused.value.retry_after_s
    with pytest.raises(RuntimeError), limit.admit(2):
        raise RuntimeError
    assert limit.running == 0


def test_a_gateway_has_its_share_of_a_replica_that_another_one_fills():
    limit = AdmissionLimit(10, share=5)
    with limit.admit(10, "a"):
        with pytest.raises(Overloaded), limit.admit(1, "a"):
            pass
        with limit.admit(4, "b"), limit.admit(3, "b"), pytest.raises(Overloaded), limit.admit(1, "b"):
            pass
        with limit.admit(2, "b"):
            assert limit.by_origin() == {"a": 10, "b": 2} and limit.running == 12
    assert limit.by_origin() == {} and limit.running == 0


class Replica:
    """An admission with a clock, and the turns that a test begins and ends."""

    def __init__(self) -> None:
        self.clock, self.preemptions = Clock(), 0
        self.prefill_tokens_per_s = self.decode_step_s = 0.0
        self.admission = SessionAdmission(CAPACITY, self, self.clock.monotonic)
        self._running = dict[str | None, tuple[AbstractContextManager[SessionTurn], SessionTurn]]()

    def begin(self, session: str | None, prompt: int, partial_tokens: int = 0) -> None:
        call = GenerateCall(
            request_id="r",
            prompt_token_ids=(1,) * prompt,
            sampling=Sampling(),
            session_id=session,
            partial_tokens=partial_tokens,
        )
        admitted = self.admission.admit(call)
        self._running[session] = admitted, admitted.__enter__()

    def end(self, session: str | None, tokens: int = 0, cached: int = 0, end: FinishReason = "stop") -> None:
        admitted, turn = self._running.pop(session)
        turn.note_cached(cached)
        turn.end([completion_of((1,) * tokens, end=end)])
        admitted.__exit__(None, None, None)

    def turn(self, session: str | None, prompt: int, tokens: int = 0, cached: int = 0) -> None:
        self.begin(session, prompt)
        self.end(session, tokens, cached)

    def refuses(self, session: str, prompt: int) -> bool:
        try:
            self.begin(session, prompt)
        except KVCacheFull:
            return True
        return False


def replica_with_agents(first: str = "old", tool_s: float = 2.0) -> Replica:
    """A replica on which the oldest session has had two turns; both had one token, and nothing is expected of it."""
    replica = Replica()
    replica.turn(first, 10, 1)
    replica.clock.go_on(tool_s)
    replica.turn(first, 10, 1)
    return replica


def test_oldest_session_never_waits_and_others_wait_for_room():
    replica = replica_with_agents()
    replica.begin("old", 700)
    assert not replica.refuses("second", 200)
    with pytest.raises(KVCacheFull, match="1000 tokens for sessions; older ones have 90") as refused:
        replica.begin("third", 200)
    assert refused.value.detail == {"window": 1000, "older": 901, "asked": 200}
    replica.end("old", 1)
    assert not replica.refuses("old", 5000)


def test_a_returning_session_goes_before_younger_ones():
    replica = replica_with_agents()
    for session in ("second", "third"):
        replica.turn(session, 300, 1)
        replica.clock.go_on(1.0)
        replica.turn(session, 300, 1, cached=250)  # of its own first turn
    assert not replica.refuses("second", 980)
    replica.end("second", 1, cached=300)
    assert replica.refuses("third", 300)  # second's memory is its own while its tool runs


def test_a_waiting_session_keeps_its_place_while_it_asks():
    replica = replica_with_agents()
    replica.begin("old", 700)
    assert replica.refuses("large", 400)
    assert replica.refuses("small", 200)  # it would fit, but large came first
    replica.clock.go_on(WAITING_S + 0.1)  # large's caller has left
    assert not replica.refuses("small", 200)


@pytest.mark.parametrize(("prefill_tokens_per_s", "held_s"), [(0.0, 4.0), (CAPACITY / 3, 3.0)])
def test_memory_is_held_as_long_as_tools_or_computing_it_take(prefill_tokens_per_s, held_s):
    replica = replica_with_agents(tool_s=2.0)  # TCP's timeout is 4 s after these times
    replica.prefill_tokens_per_s = prefill_tokens_per_s
    replica.clock.go_on(2.0)
    replica.turn("old", 900, 1)
    replica.clock.go_on(held_s - 0.1)
    assert replica.refuses("new", 200)
    replica.clock.go_on(0.2)
    assert not replica.refuses("new", 200)
    assert not replica.refuses("old", 900)


def test_no_session_waits_if_tools_take_longer_than_computing_it():
    replica = replica_with_agents(tool_s=2.0)
    replica.prefill_tokens_per_s = CAPACITY / 1.9
    replica.clock.go_on(2.0)
    replica.begin("old", 900)
    assert not replica.refuses("new", 900)


def test_waiting_for_memory_is_no_tool_time():
    replica = replica_with_agents(tool_s=2.0)
    replica.prefill_tokens_per_s = CAPACITY / 5
    replica.turn("second", 200, 1)
    replica.clock.go_on(2.0)
    replica.begin("old", 900)
    for _ in range(20):
        assert replica.refuses("second", 201)
        replica.clock.go_on(1.0)
    replica.end("old", 1)
    replica.clock.go_on(2.0)
    replica.turn("old", 10, 1)
    assert not replica.refuses("second", 201)
    assert replica.refuses("new", 900)  # tools still take less than computing the cache


def test_no_session_waits_if_turns_take_longer_than_computing_it():
    replica = replica_with_agents(tool_s=2.0)
    replica.prefill_tokens_per_s, replica.decode_step_s = CAPACITY / 10, 0.1
    replica.clock.go_on(2.0)
    replica.turn("old", 900, 10)
    replica.clock.go_on(2.0)
    replica.turn("old", 900, 150)
    assert replica.refuses("new", 900)  # completions have 40 tokens on average, in 4 s
    replica.clock.go_on(2.0)
    replica.turn("old", 900, 300)
    assert not replica.refuses("new", 900)


def test_sessions_of_one_turn_are_never_refused():
    replica = Replica()
    for i in range(20):
        replica.begin(f"rollout-{i}", 900)
    for i in range(20):
        replica.end(f"rollout-{i}", 50)
    assert not replica.refuses("new", 900)


def test_calls_without_a_session_are_not_refused_but_count():
    replica = replica_with_agents()
    with ExitStack() as running:
        call = GenerateCall(request_id="r", prompt_token_ids=(1,) * 600, sampling=Sampling())
        for _ in range(5):
            running.enter_context(replica.admission.admit(call))
        assert replica.refuses("new", 100)
        assert not replica.refuses("old", 100)  # it began before them
    assert not replica.refuses("new", 100)


def test_rest_of_an_aborted_turn_is_no_return():
    replica = Replica()
    replica.begin("a", 10)
    replica.end("a", 5, end="abort")
    replica.begin("a", 15, partial_tokens=5)
    replica.end("a", 5)
    replica.begin("b", 900)
    assert not replica.refuses("c", 900)  # no session has had a second turn


def test_shared_prompts_count_once():
    replica = Replica()
    for i in range(20):
        replica.begin(f"s{i}", 700)
    for i in range(20):  # the first one has written the system prompt of 700 tokens
        replica.end(f"s{i}", 1, cached=690 if i else 0)
    replica.clock.go_on(1.0)
    for i in range(20):
        assert not replica.refuses(f"s{i}", 702)
    assert not replica.refuses("new", 700)


def test_completions_count_as_long_as_they_were():
    replica = replica_with_agents()
    for _ in range(2):
        replica.turn("talks", 100, 800)
        replica.clock.go_on(10.0)
    replica.begin("talks", 700)
    assert replica.refuses("new", 100)  # half of 800 tokens is expected beside the prompt
    replica.end("talks", 10)


def test_preemptions_shrink_the_window_and_time_restores_it():
    replica = replica_with_agents()
    replica.begin("old", 1000)
    assert replica.admission.window() == CAPACITY
    replica.preemptions = 3
    assert replica.admission.window() == pytest.approx(DECREASE * CAPACITY)
    replica.preemptions = 5
    assert replica.admission.window() == pytest.approx(DECREASE * CAPACITY)  # sessions had no time to leave
    replica.clock.go_on(DECREASE_PERIOD_S)
    grown = DECREASE + INCREASE_PER_S * DECREASE_PERIOD_S
    assert replica.admission.window() == pytest.approx(grown * CAPACITY)
    replica.preemptions = 6
    assert replica.admission.window() == pytest.approx(DECREASE * grown * CAPACITY)
    replica.clock.go_on(1e4)
    assert replica.admission.window() == CAPACITY


def test_window_shrinks_below_what_is_there_but_not_forever():
    replica = replica_with_agents()
    replica.begin("old", 500)
    for preempted in range(1, 20):
        replica.preemptions = preempted
        window = replica.admission.window()
        assert preempted > 1 or window == pytest.approx(DECREASE * 500, rel=0.01)
        assert window >= MIN_SHARE * CAPACITY
        replica.clock.go_on(DECREASE_PERIOD_S)


def test_ended_calls_and_sessions_leave_no_record_in_the_sum():
    replica = Replica()
    for i in range(50):
        replica.turn(f"s{i}", 10, 1)
        replica.turn(None, 10, 1)
    assert not replica.admission._counted
