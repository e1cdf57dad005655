"""Which replica gets a call."""

import itertools
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from rollout_service.fleet import routing
from rollout_service.fleet.routing import (
    MAX_PREFIX_TOKENS,
    MAX_SESSIONS,
    NEVER_SENT_S,
    PREFIX_TOKENS,
    Candidate,
    Ledger,
    RolloutRouter,
    prefixes,
    rank_replicas,
)
from rollout_service.protocol.adapters import WantedAdapter
from rollout_service.protocol.sampling import GenerateCall, Sampling


def call_of(number: int) -> tuple[str, int]:
    """The id of a call of one gateway."""
    return "gateway", number


IDLE = [Candidate("a", version=3), Candidate("b", version=3), Candidate("c", version=3)]


class TestRanked:
    def test_the_least_loaded_replica_comes_first(self):
        candidates = [Candidate("a", load=5), Candidate("b", load=0), Candidate("c", load=2)]
        assert rank_replicas(candidates) == ["b", "c", "a"]

    def test_equally_loaded_replicas_take_turns(self):
        ledger, chosen = Ledger(), []
        for call in range(6):
            order = rank_replicas([Candidate(i, load=ledger.load(i), turn=ledger.turn(i)) for i in "abc"])
            ledger.choose(call_of(call), order[0], 1, None, now=0)
            ledger.complete(call_of(call))
            chosen.append(order[0])
        assert chosen == ["a", "b", "c"] * 2

    def test_a_replica_with_the_version_ranks_first_at_any_load(self):
        candidates = [Candidate("a", version=3, load=0), Candidate("b", version=4, load=50), Candidate("c", version=5)]
        assert rank_replicas(candidates, min_version=4) == ["c", "b", "a"]
        assert rank_replicas(candidates) == ["a", "c", "b"]

    def test_replica_with_the_exact_version_ranks_first(self):
        candidates = [Candidate("a", version=3), Candidate("b", version=4, load=50), Candidate("c", version=5)]
        assert rank_replicas(candidates, exact_version=4) == ["b", "a", "c"]

    def test_a_replica_with_the_adapter_ranks_first_at_any_load(self):
        assert rank_replicas([Candidate("a", has_adapter=False), Candidate("b", load=50)]) == ["b", "a"]

    def test_a_replica_without_a_report_is_taken_for_up_to_date(self):
        assert rank_replicas([Candidate("a", version=3), Candidate("b", load=1)], min_version=4) == ["b", "a"]

    def test_a_session_stays_with_its_replica_whatever_the_load(self):
        candidates = [Candidate("a", load=0), Candidate("b", load=50)]
        assert rank_replicas(candidates, session_replica="b") == ["b", "a"]
        assert rank_replicas(candidates, session_replica="gone") == ["a", "b"]

    def test_a_session_leaves_a_replica_that_is_full(self):
        candidates = [Candidate("a", version=3), Candidate("b", version=4, is_full=True)]
        assert rank_replicas(candidates, session_replica="b") == ["a", "b"]
        assert rank_replicas(candidates, min_version=4) == ["b", "a"]

    def test_a_session_leaves_a_replica_that_is_behind_or_failed_it(self):
        candidates = [Candidate("a", version=4), Candidate("b", version=3)]
        assert rank_replicas(candidates, session_replica="b", min_version=4) == ["a", "b"]
        assert rank_replicas(candidates, session_replica="b", avoid=["b"]) == ["a", "b"]

    @pytest.mark.parametrize("state", ["stale", "draining", "failed"])
    def test_a_replica_in_a_bad_state_is_ranked_last_but_kept(self, state):
        candidates = [Candidate("a", state=state), Candidate("b", state="syncing", load=50)]
        assert rank_replicas(candidates, session_replica="a") == ["b", "a"]

    def test_a_failed_replica_ranks_below_one_the_call_should_avoid(self):
        assert rank_replicas([Candidate("a", state="failed"), Candidate("b")], avoid=["b"]) == ["b", "a"]

    def test_a_prompt_that_begins_alike_goes_where_the_last_one_went(self):
        candidates = [Candidate("a", load=0, capacity=64), Candidate("b", load=15, capacity=64)]
        assert rank_replicas(candidates, prefix_replica="b") == ["b", "a"]
        assert rank_replicas(candidates, prefix_replica="gone") == ["a", "b"]
        assert rank_replicas(candidates, session_replica="a", prefix_replica="b") == ["a", "b"]

    @pytest.mark.parametrize(("load", "sequences"), [(17, 1), (60, 8)])
    def test_it_leaves_a_replica_that_is_full_or_far_fuller_than_others(self, load, sequences):
        other = Candidate("a", load=0 if sequences == 1 else 59, capacity=64)
        candidates = [other, Candidate("b", load=load, capacity=64)]
        assert rank_replicas(candidates, prefix_replica="b", sequences=sequences) == ["a", "b"]

    def test_of_a_replica_that_has_not_told_its_capacity_the_load_decides(self):
        assert rank_replicas([Candidate("a"), Candidate("b", load=1)], prefix_replica="b") == ["a", "b"]

    def test_a_group_sent_one_by_one_stays_together_and_groups_spread(self):
        ledger, chosen = Ledger(), []
        for call, group in enumerate([0] * 8 + [1] * 8 + [0] * 8):
            begins = prefixes([group] * PREFIX_TOKENS)
            candidates = [Candidate(i, load=ledger.load(i), turn=ledger.turn(i), capacity=64) for i in "ab"]
            order = rank_replicas(candidates, prefix_replica=ledger.replica_with(begins))
            ledger.choose(call_of(call), order[0], 1, None, 0.0, begins)
            chosen.append(order[0])
        assert chosen == ["a"] * 8 + ["b"] * 8 + ["a"] * 8

    def test_every_candidate_is_ranked_exactly_once(self):
        for avoid in itertools.chain.from_iterable(itertools.combinations("abc", n) for n in range(4)):
            assert sorted(rank_replicas(IDLE, min_version=9, avoid=avoid)) == ["a", "b", "c"]


class TestLedger:
    def test_calls_count_with_all_their_sequences_from_choice_to_end(self):
        ledger = Ledger()
        ledger.choose(call_of(1), "a", 8, None, now=0)
        ledger.choose(call_of(2), "a", 1, None, now=0)
        assert ledger.load("a") == 9
        ledger.arrive(call_of(1), "a")
        ledger.complete(call_of(1))
        assert ledger.load("a") == 1
        ledger.complete(call_of(2))
        ledger.complete(call_of(2))
        assert ledger.load("a") == 0

    def test_a_call_counts_where_it_arrived_and_so_does_its_session(self):
        ledger = Ledger()
        ledger.choose(call_of(1), "a", 4, "s", now=0)
        ledger.arrive(call_of(1), "b")
        assert (ledger.load("a"), ledger.load("b"), ledger.replica_of("s")) == (0, 4, "b")

    def test_calls_of_other_routers_are_ignored(self):
        ledger = Ledger()
        ledger.choose(call_of(1), "a", 4, None, now=0)
        ledger.arrive(("another", 1), "b")
        ledger.complete(("another", 1))
        assert (ledger.load("a"), ledger.load("b")) == (4, 0)

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
        monkeypatch.setattr(routing, "MAX_PREFIXES", 2)
        ledger = Ledger()
        for number, prompt in enumerate((1, 2, 1, 3)):
            ledger.choose(call_of(number), "a", 1, None, 0.0, prefixes([prompt] * PREFIX_TOKENS))
        known = [ledger.replica_with(prefixes([prompt] * PREFIX_TOKENS)) for prompt in (1, 2, 3)]
        assert known == ["a", None, "a"]

    def test_the_session_that_was_silent_longest_is_forgotten_first(self):
        ledger = Ledger()
        for session in range(MAX_SESSIONS):
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
