"""Which replica gets a call, and what the router tells the gateway of the replicas."""

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from rollout_service.fleet.routing import (
    MAX_PREFIX_TOKENS,
    PREFIX_TOKENS,
    Candidate,
    RolloutRouter,
    prefixes,
    rank_replicas,
)
from rollout_service.protocol.adapters import WantedAdapter
from rollout_service.protocol.sampling import GenerateCall, Sampling
from rollout_service.runtime import placements
from rollout_service.runtime.placements import NEVER_SENT_S, Ledger, RoutedFleet, RoutedReplica


def call_of(number: int) -> tuple[str, int]:
    """The id of a call of one gateway."""
    return "gateway", number


C = Candidate
OLD_AND_NEW = [C("a", version=3), C("b", version=4, load=50), C("c", version=5)]


def of_64(name: str, load: int) -> Candidate:
    return Candidate(name, load=load, capacity=64)


class TestRanked:
    @pytest.mark.parametrize(
        ("candidates", "wanted", "order"),
        [
            ([C("a", load=5), C("b", load=0), C("c", load=2)], {}, "bca"),
            (OLD_AND_NEW, {"min_version": 4}, "cba"),
            (OLD_AND_NEW, {"exact_version": 4}, "bac"),
            (OLD_AND_NEW, {}, "acb"),
            ([C("a", has_adapter=False), C("b", load=50)], {}, "ba"),
            ([C("a", version=3), C("b", load=1)], {"min_version": 4}, "ba"),  # without a report it is up to date
            ([C("a"), C("b", load=50)], {"session_replica": "b"}, "ba"),
            ([C("a"), C("b", load=50)], {"session_replica": "gone"}, "ab"),
            ([C("a", version=3), C("b", version=4, is_full=True)], {"session_replica": "b"}, "ab"),
            ([C("a", version=3), C("b", version=4, is_full=True)], {"session_replica": "b", "min_version": 4}, "ba"),
            ([C("a", version=4), C("b", version=3)], {"session_replica": "b", "min_version": 4}, "ab"),
            ([C("a"), C("b")], {"session_replica": "b", "avoid": ["b"]}, "ab"),
            ([C("a", state="stale"), C("b", state="syncing", load=50)], {"session_replica": "a"}, "ba"),
            ([C("a", state="draining"), C("b", state="stale", load=50)], {"session_replica": "a"}, "ba"),
            ([C("a", state="failed"), C("b")], {"avoid": ["b"]}, "ba"),
            # a prefix goes where the last one went, unless that replica is full, or far fuller than others
            ([of_64("a", 0), of_64("b", 15)], {"prefix_replica": "b"}, "ba"),
            ([of_64("a", 0), of_64("b", 15)], {"prefix_replica": "b", "session_replica": "a"}, "ab"),
            ([of_64("a", 0), of_64("b", 17)], {"prefix_replica": "b"}, "ab"),
            ([of_64("a", 59), of_64("b", 60)], {"prefix_replica": "b", "sequences": 8}, "ab"),
            ([C("a"), C("b", load=1)], {"prefix_replica": "b"}, "ab"),  # it has not told its capacity
        ],
    )
    def test_criteria_decide_in_their_order(self, candidates, wanted, order):
        assert rank_replicas(candidates, **wanted) == list(order)

    def test_equally_loaded_replicas_take_turns(self):
        ledger, chosen = Ledger(), []
        for call in range(6):
            order = rank_replicas([Candidate(i, load=ledger.load(i), turn=ledger.turn(i)) for i in "abc"])
            ledger.choose(call_of(call), order[0], 1, None, now=0)
            ledger.complete(call_of(call))
            chosen.append(order[0])
        assert chosen == ["a", "b", "c"] * 2

    def test_a_group_sent_one_by_one_stays_together_and_groups_spread(self):
        ledger, chosen = Ledger(), []
        for call, group in enumerate([0] * 8 + [1] * 8 + [0] * 8):
            begins = prefixes([group] * PREFIX_TOKENS)
            candidates = [Candidate(i, load=ledger.load(i), turn=ledger.turn(i), capacity=64) for i in "ab"]
            order = rank_replicas(candidates, prefix_replica=ledger.replica_with(begins))
            ledger.choose(call_of(call), order[0], 1, None, 0.0, begins)
            chosen.append(order[0])
        assert chosen == ["a"] * 8 + ["b"] * 8 + ["a"] * 8


class TestLedger:
    def test_calls_count_where_they_arrived_from_choice_to_end(self):
        ledger = Ledger()
        ledger.choose(call_of(1), "a", 8, "s", now=0)
        ledger.choose(call_of(2), "a", 1, None, now=0)
        assert ledger.load("a") == 9
        ledger.arrive(call_of(1), "b")
        ledger.arrive(("another", 2), "b")  # of another router
        ledger.complete(("another", 2))
        assert (ledger.load("a"), ledger.load("b"), ledger.replica_of("s")) == (1, 8, "b")
        for _ in range(2):
            ledger.complete(call_of(1))
        assert (ledger.load("a"), ledger.load("b")) == (1, 0)

    def test_of_a_replicas_report_only_other_gateways_load_counts(self):
        ledger = Ledger()
        ledger.origin = "us"
        ledger.choose(call_of(1), "a", 4, None, now=0)
        ledger.report("a", {"us": 9, "them": 5, "others": 1})  # of a moment when we had 9 there
        assert ledger.load("a") == 10
        ledger.complete(call_of(1))
        assert ledger.load("a") == 6
        ledger.report("a", {"us": 4})
        assert ledger.load("a") == 0

    def test_what_was_on_a_replica_that_is_gone_is_forgotten(self):
        ledger = Ledger()
        ledger.choose(call_of(1), "a", 4, None, now=0)
        ledger.report("a", {"them": 6})
        ledger.keep_only({"b"}, now=1)
        assert ledger.load("a") == 0
        ledger.complete(call_of(1))
        assert ledger.load("a") == 0

    def test_a_call_that_never_left_counts_for_a_while_only(self):
        ledger = Ledger()
        ledger.choose(call_of(1), "a", 4, None, now=0)
        ledger.choose(call_of(2), "a", 1, None, now=0)
        ledger.arrive(call_of(2), "a")
        ledger.keep_only({"a"}, now=NEVER_SENT_S - 1)
        assert ledger.load("a") == 5
        ledger.keep_only({"a"}, now=NEVER_SENT_S + 1)
        assert ledger.load("a") == 1

    def test_a_beginning_is_remembered_where_its_last_call_arrived(self):
        ledger, begins = Ledger(), prefixes(range(2 * PREFIX_TOKENS))
        ledger.choose(call_of(1), "a", 4, None, 0.0, begins)
        assert ledger.replica_with(begins) == "a"
        ledger.arrive(call_of(1), "b")
        assert ledger.replica_with(begins) == "b"
        assert ledger.replica_with(prefixes(range(PREFIX_TOKENS))) == "b"
        assert ledger.replica_with(prefixes(range(1, 1 + PREFIX_TOKENS))) is None
        assert ledger.replica_with(()) is None

    def test_the_longest_beginning_in_common_decides(self):
        ledger, system = Ledger(), range(PREFIX_TOKENS)
        first, second = [*system, *[1] * PREFIX_TOKENS], [*system, *[2] * PREFIX_TOKENS]
        ledger.choose(call_of(1), "a", 1, None, 0.0, prefixes(first))
        ledger.choose(call_of(2), "b", 1, None, 0.0, prefixes(second))
        assert ledger.replica_with(prefixes([*first, 3])) == "a"
        assert ledger.replica_with(prefixes([*system, 4])) == "b"

    def test_the_beginning_that_was_silent_longest_is_forgotten_first(self, monkeypatch):
        monkeypatch.setattr(placements, "MAX_PREFIXES", 2)
        ledger = Ledger()
        for number, prompt in enumerate((1, 2, 1, 3)):
            ledger.choose(call_of(number), "a", 1, None, 0.0, prefixes([prompt] * PREFIX_TOKENS))
        known = [ledger.replica_with(prefixes([prompt] * PREFIX_TOKENS)) for prompt in (1, 2, 3)]
        assert known == ["a", None, "a"]

    def test_the_session_that_was_silent_longest_is_forgotten_first(self, monkeypatch):
        monkeypatch.setattr(placements, "MAX_SESSIONS", 2)
        ledger = Ledger()
        for session in range(2):
            ledger.choose(call_of(1), "a", 1, str(session), now=0)
        ledger.choose(call_of(1), "b", 1, "0", now=0)
        ledger.choose(call_of(1), "a", 1, "new", now=0)
        assert (ledger.replica_of("0"), ledger.replica_of("1"), ledger.replica_of("new")) == ("b", None, "a")
        assert ledger.replica_of(None) is None


class TestPrefixes:
    def test_a_prompt_has_one_for_each_whole_part(self):
        tokens = list(range(3 * PREFIX_TOKENS))
        longest, middle, shortest = prefixes(tokens)
        assert prefixes(tokens[: 2 * PREFIX_TOKENS + 1]) == (middle, shortest)
        assert prefixes(tokens[: PREFIX_TOKENS - 1]) == ()
        assert len({longest, middle, shortest}) == 3

    def test_salts_keep_prompts_apart_as_they_do_in_the_cache(self):
        tokens = [0] * PREFIX_TOKENS
        assert len({prefixes(tokens), prefixes(tokens, "a"), prefixes(tokens, "b")}) == 3

    def test_of_a_very_long_prompt_the_beginning_is_looked_at(self):
        tokens = range(2 * MAX_PREFIX_TOKENS)
        assert prefixes(tokens) == prefixes(tokens[:MAX_PREFIX_TOKENS])


class TestReplicasOfServe:
    """The router's choice among replicas as Serve describes them."""

    STATS: ClassVar[dict[str, Any]] = {"version": 1, "state": "ready", "running": {}, "capacity": 8}

    async def choose(self, call: GenerateCall, loads: dict[str, int], **stats: Any) -> list[str]:
        """The ids, best first, of replicas with so many sequences. ``stats``: what each publishes besides."""
        router = RolloutRouter.__new__(RolloutRouter)  # without Serve's event loop and controller
        router.initialize_state(limit=8, share=2, group=None)
        for replica_id, load in reversed(loads.items()):  # the session was on the first one last
            router._ledger.choose(("before", load), replica_id, load, call.session_id, now=0)
        pending = SimpleNamespace(args=[call])
        replicas = [
            SimpleNamespace(
                replica_id=SimpleNamespace(unique_id=replica_id), routing_stats=self.STATS | stats.get(replica_id, {})
            )
            for replica_id in loads
        ]
        ranks = await router.choose_replicas(cast(Any, replicas), cast(Any, pending))
        return [replica.replica_id.unique_id for [replica] in ranks]

    async def test_a_full_replica_comes_last_even_for_its_session(self):
        call = GenerateCall(request_id="r", prompt_token_ids=(5,), sampling=Sampling(max_tokens=1), session_id="s")
        assert await self.choose(call, {"full": 8, "free": 7}) == ["free", "full"]
        assert await self.choose(call, {"busy": 7, "free": 0}) == ["busy", "free"]

    async def test_a_replica_that_holds_the_adapter_comes_first(self):
        call = GenerateCall(
            request_id="r",
            prompt_token_ids=(5,),
            sampling=Sampling(max_tokens=1),
            adapter=WantedAdapter(name="run", min_version=2),
        )
        held = {"old": {"adapters": {"run": 1}}, "new": {"adapters": {"run": 2}}}
        assert await self.choose(call, {"old": 0, "new": 3}, **held) == ["new", "old"]


def test_room_is_what_other_gateways_leave_and_the_share_at_least():
    fleet = RoutedFleet()
    assert fleet.room(limit=10, share=5) == 0
    fleet.update({"a": RoutedReplica("ready", 3, others=2), "b": RoutedReplica("syncing", None, others=9)})
    assert fleet.room(limit=10, share=5) == 8 + 5
    fleet.update({state: RoutedReplica(state, 3, others=0) for state in ("failed", "draining", "stale")})
    assert fleet.room(limit=10, share=1) == 10


def test_changes_of_the_load_are_told_apart_from_others():
    fleet, told = RoutedFleet(), list[bool]()
    fleet.listen(told.append)
    for replicas in (
        {"a": RoutedReplica("ready", 3, 0)},
        {"a": RoutedReplica("ready", 3, 5)},
        {"a": RoutedReplica("ready", 4, 5)},
        {"a": RoutedReplica("stale", 4, 5)},
        {"b": RoutedReplica("stale", 4, 5)},
        {},
    ):
        fleet.update(replicas)
    assert told == [True, False, True, True, True, True]
