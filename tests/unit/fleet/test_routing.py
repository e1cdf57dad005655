"""Which replica gets a call."""

import itertools

import pytest

from rollout_service.fleet.routing import MOST_SESSIONS, NEVER_SENT_S, Candidate, Ledger, ranked

IDLE = [Candidate("a", version=3), Candidate("b", version=3), Candidate("c", version=3)]


class TestRanked:
    def test_the_least_loaded_replica_comes_first(self) -> None:
        candidates = [Candidate("a", load=5), Candidate("b", load=0), Candidate("c", load=2)]
        assert ranked(candidates) == ["b", "c", "a"]

    def test_equally_loaded_replicas_take_turns(self) -> None:
        ledger, chosen = Ledger(), []
        for call in range(6):
            order = ranked([Candidate(i, load=ledger.load(i), turn=ledger.turn(i)) for i in "abc"])
            ledger.choose(str(call), order[0], 1, None, now=0)
            ledger.complete(str(call))
            chosen.append(order[0])
        assert chosen == ["a", "b", "c"] * 2

    def test_a_replica_with_the_version_ranks_first_at_any_load(self) -> None:
        candidates = [Candidate("a", version=3, load=0), Candidate("b", version=4, load=50), Candidate("c", version=5)]
        assert ranked(candidates, min_version=4) == ["c", "b", "a"]
        assert ranked(candidates) == ["a", "c", "b"]

    def test_a_replica_without_a_report_is_taken_for_up_to_date(self) -> None:
        assert ranked([Candidate("a", version=3), Candidate("b", load=1)], min_version=4) == ["b", "a"]

    def test_a_session_stays_with_its_replica_whatever_the_load(self) -> None:
        candidates = [Candidate("a", load=0), Candidate("b", load=50)]
        assert ranked(candidates, session_replica="b") == ["b", "a"]
        assert ranked(candidates, session_replica="gone") == ["a", "b"]

    def test_a_session_leaves_a_replica_that_is_behind_or_failed_it(self) -> None:
        candidates = [Candidate("a", version=4), Candidate("b", version=3)]
        assert ranked(candidates, session_replica="b", min_version=4) == ["a", "b"]
        assert ranked(candidates, session_replica="b", avoid=["b"]) == ["a", "b"]

    @pytest.mark.parametrize("state", ["stale", "draining", "failed"])
    def test_a_replica_in_a_bad_state_is_ranked_last_but_kept(self, state: str) -> None:
        candidates = [Candidate("a", state=state), Candidate("b", state="syncing", load=50)]
        assert ranked(candidates, session_replica="a") == ["b", "a"]

    def test_a_failed_replica_ranks_below_one_the_call_should_avoid(self) -> None:
        assert ranked([Candidate("a", state="failed"), Candidate("b")], avoid=["b"]) == ["b", "a"]

    def test_every_candidate_is_ranked_exactly_once(self) -> None:
        for avoid in itertools.chain.from_iterable(itertools.combinations("abc", n) for n in range(4)):
            assert sorted(ranked(IDLE, min_version=9, avoid=avoid)) == ["a", "b", "c"]


class TestLedger:
    def test_calls_count_with_all_their_sequences_from_choice_to_end(self) -> None:
        ledger = Ledger()
        ledger.choose("1", "a", 8, None, now=0)
        ledger.choose("2", "a", 1, None, now=0)
        assert ledger.load("a") == 9
        ledger.arrive("1", "a", None)
        ledger.complete("1")
        assert ledger.load("a") == 1
        ledger.complete("2")
        ledger.complete("2")
        assert ledger.load("a") == 0

    def test_a_call_counts_where_it_arrived_and_so_does_its_session(self) -> None:
        ledger = Ledger()
        ledger.choose("1", "a", 4, "s", now=0)
        ledger.arrive("1", "b", "s")
        assert (ledger.load("a"), ledger.load("b"), ledger.replica_of("s")) == (0, 4, "b")

    def test_a_call_done_before_its_arrival_is_told_counts_no_more(self) -> None:
        ledger = Ledger()
        ledger.choose("1", "a", 4, None, now=0)
        ledger.complete("1")
        ledger.arrive("1", "a", None)
        assert ledger.load("a") == 0

    def test_of_a_replicas_report_only_other_gateways_load_counts(self) -> None:
        ledger = Ledger()
        ledger.origin = "us"
        ledger.choose("1", "a", 4, None, now=0)
        ledger.report("a", {"us": 9, "them": 5, "others": 1})  # of a moment when we had 9 there
        assert ledger.load("a") == 10
        ledger.complete("1")
        assert ledger.load("a") == 6
        ledger.report("a", {"us": 4})
        assert ledger.load("a") == 0

    def test_what_was_on_a_replica_that_is_gone_is_forgotten(self) -> None:
        ledger = Ledger()
        ledger.choose("1", "a", 4, None, now=0)
        ledger.report("a", {"them": 6})
        ledger.keep_only({"b"}, now=1)
        assert ledger.load("a") == 0
        ledger.complete("1")
        assert ledger.load("a") == 0

    def test_a_call_that_never_left_counts_for_a_while_only(self) -> None:
        ledger = Ledger()
        ledger.choose("1", "a", 4, None, now=0)
        ledger.choose("2", "a", 1, None, now=0)
        ledger.arrive("2", "a", None)
        ledger.keep_only({"a"}, now=NEVER_SENT_S - 1)
        assert ledger.load("a") == 5
        ledger.keep_only({"a"}, now=NEVER_SENT_S + 1)
        assert ledger.load("a") == 1

    def test_the_session_that_was_silent_longest_is_forgotten_first(self) -> None:
        ledger = Ledger()
        for session in range(MOST_SESSIONS):
            ledger.choose("1", "a", 1, str(session), now=0)
        ledger.choose("1", "b", 1, "0", now=0)
        ledger.choose("1", "a", 1, "new", now=0)
        assert (ledger.replica_of("0"), ledger.replica_of("1"), ledger.replica_of("new")) == ("b", None, "a")
        assert ledger.replica_of(None) is None
