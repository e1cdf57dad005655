"""The table of live replicas."""

import pytest

from rollout_service.fleet.registry import FleetTable
from rollout_service.protocol.adapters import AdapterVersion, HeldAdapter
from rollout_service.protocol.fleet import ReplicaStatus
from tests.support.clock import Clock
from tests.unit.ingest.trainer import replica


@pytest.fixture
def table(clock: Clock) -> FleetTable:
    return FleetTable(dead_after_s=60)


class TestReports:
    def test_the_table_shows_the_last_report_of_each_replica_by_name(self, table):
        table.report(replica("b", 1))
        table.report(replica("a", 1, sequence=1))
        table.report(replica("a", 2, sequence=2))
        assert [(status.replica_id, status.version) for status in table.live()] == [("a", 2), ("b", 1)]

    def test_a_report_that_was_overtaken_on_its_way_is_ignored(self, table):
        table.report(replica("a", 2, sequence=2))
        table.report(replica("a", 1, sequence=1))
        assert table.live()[0].version == 2

    def test_report_sequence_numbers_are_compared_per_replica(self, table):
        table.report(replica("a", 2, sequence=9))
        table.report(replica("b", 1, sequence=1))
        assert not table.all_serve(2)

    def test_a_replica_that_is_silent_for_too_long_leaves_the_table(self, table, clock):
        table.report(replica("silent", 1))
        clock.go_on(59)
        table.report(replica("alive", 2))
        assert [status.replica_id for status in table.live()] == ["alive", "silent"]
        clock.go_on(1)
        assert [status.replica_id for status in table.live()] == ["alive"]
        assert table.in_use() == {2} and table.all_serve(2)

    def test_a_replica_that_was_silent_may_come_back(self, table, clock):
        table.report(replica("a", 1, sequence=5))
        clock.go_on(61)
        assert table.live() == ()
        table.report(replica("a", 1, sequence=6))
        assert len(table.live()) == 1

    def test_reports_say_how_old_they_are(self, table, clock):
        table.report(replica("a", 1))
        clock.go_on(7.5)
        table.report(replica("b", 1))
        assert [status.age_s for status in table.live()] == [7.5, 0.0]


class TestWaitedFor:
    def test_pinned_replica_is_not_waited_for_and_proves_nothing(self, table):
        table.report(replica("pinned", 5).model_copy(update={"group": "eval"}))
        assert not table.all_serve(5)
        table.report(replica("a", 7))
        assert table.all_serve(7) and table.in_use() == {5, 7}

    @pytest.mark.parametrize(
        ("versions", "served"),
        [([], False), ([1], False), ([2], True), ([3], True), ([2, 1], False), ([2, 3], True)],
    )
    def test_a_version_is_live_when_all_replicas_serve_it_or_a_newer(self, table, versions, served):
        for number, version in enumerate(versions):
            table.report(replica(f"replica-{number}", version))
        assert table.all_serve(2) is served

    @pytest.mark.parametrize(
        ("obeyed", "all_obey"),
        [([], False), (["new"], True), (["old"], False), (["new", "old"], False), (["new", "new"], True)],
    )
    def test_a_pause_or_resume_is_obeyed_when_all_obeyed_that_one(self, table, obeyed, all_obey):
        for number, order in enumerate(obeyed):
            table.report(replica(f"replica-{number}", 1, obeyed=order))
        assert table.all_obey("new") is all_obey

    def test_a_starting_replica_is_in_the_table_but_not_waited_for(self, table):
        table.report(replica("newcomer", None, state="starting"))
        assert [status.state for status in table.live()] == ["starting"]
        assert not table.all_serve(0) and not table.all_obey("") and not table.all_obey("new")
        table.report(replica("old", 2, obeyed="new"))
        assert table.all_serve(2) and table.all_obey("new")
        table.report(replica("newcomer", 1, sequence=1))
        assert not table.all_serve(2) and not table.all_obey("new")

    def test_sleep_waits_for_a_starting_replica_that_takes_memory(self, table):
        table.report(replica("sleeps", None, state="asleep", obeyed="new"))
        table.report(replica("newcomer", None, state="starting"))
        assert table.all_obey("new", asleep=True)
        table.report(replica("newcomer", None, state="syncing", sequence=1, takes_memory=True))
        assert table.all_obey("new") and not table.all_obey("new", asleep=True)
        table.report(replica("newcomer", None, state="asleep", sequence=2, takes_memory=True, obeyed="new"))
        assert table.all_obey("new", asleep=True)

    def test_a_replica_that_sleeps_or_wakes_is_waited_for_by_orders_alone(self, table):
        table.report(replica("sleeps", None, state="asleep", obeyed="old"))
        table.report(replica("serves", 2, obeyed="new"))
        assert table.all_serve(2) and not table.all_obey("new")
        table.report(replica("sleeps", None, state="asleep", sequence=1, obeyed="new"))
        assert table.all_obey("new")

    def test_a_draining_replica_is_in_the_table_but_not_waited_for(self, table):
        table.report(replica("leaves", 1, state="draining"))
        assert [status.state for status in table.live()] == ["draining"] and table.in_use() == {1}
        assert not table.all_serve(1)  # nobody takes requests
        table.report(replica("stays", 2))
        assert table.all_serve(2)

    def test_a_replica_that_says_goodbye_leaves_despite_late_reports(self, table):
        table.report(replica("gone", 1, sequence=4))
        table.report(replica("stays", 2))
        table.leave("gone")
        assert table.all_serve(2) and table.in_use() == {2}
        table.report(replica("gone", 1, sequence=5))
        assert [status.replica_id for status in table.live()] == ["stays"]

    def test_a_replica_known_from_before_that_leaves_is_not_awaited(self):
        table = FleetTable(dead_after_s=60, may_be_empty=True)
        table.wait_for(frozenset({"a", "b"}))
        table.leave("a")
        assert not table.is_complete()
        table.leave("b")
        assert table.is_complete() and table.all_serve(5)


class TestComplete:
    def test_the_fleet_is_complete_once_known_replicas_report_or_die(self, table, clock):
        table.wait_for(frozenset({"a", "b"}))
        table.report(replica("a", 2))
        assert not table.all_serve(2) and not table.all_obey("") and not table.is_complete()
        table.report(replica("b", 2))
        assert table.all_serve(2) and table.all_obey("") and table.is_complete()
        table.wait_for(frozenset({"gone"}))
        clock.go_on(59)
        assert not table.is_complete()
        clock.go_on(1)
        assert table.is_complete()

    def test_an_empty_table_is_waited_for_unless_zero_is_allowed(self, table):
        assert not table.all_serve(0) and not table.all_obey("new")
        scaled_to_zero = FleetTable(dead_after_s=60, may_be_empty=True)
        assert scaled_to_zero.all_serve(0) and scaled_to_zero.all_obey("new")
        scaled_to_zero.report(replica("a", 1))
        assert not scaled_to_zero.all_serve(2) and not scaled_to_zero.all_obey("new")


class TestAdapters:
    def test_equal_files_of_another_version_are_not_the_version(self, table):
        first = AdapterVersion(name="a", version=1, digest="d", base_version=1, base_digest="b", rank=4, nbytes=1)
        held = HeldAdapter(name="a", version=1, digest="d")
        table.report(replica("r", 1).model_copy(update={"adapters": (held,)}))
        for other in ({"version": 2}, {"name": "b"}):
            assert table.adapter(first.model_copy(update=other)) == {"r": None}
        assert table.adapter(first) == {"r": held}


class TestFailedStarts:
    """The first reason stays until a replica serves, and is told afterwards, too."""

    @staticmethod
    def report(table: FleetTable, replica: str, version: int | None = None, error: str | None = None) -> None:
        state = "failed" if error else "starting" if version is None else "ready"
        table.report(ReplicaStatus(replica_id=replica, version=version, state=state, error=error))

    @staticmethod
    def told(table: FleetTable) -> tuple[int, str, str, bool] | None:
        found = table.failed_starts
        return found and (found.tries, found.first.reason, found.last.reason, found.over)

    def test_the_first_reason_stays_as_more_replicas_fail_and_leave(self, table):
        assert self.told(table) is None
        for number in range(3):
            self.report(table, f"r{number}")
            self.report(table, f"r{number}", error=f"reason {number}")
            self.report(table, f"r{number}", error="said again")
            table.leave(f"r{number}")
        assert self.told(table) == (3, "reason 0", "reason 2", False)

    def test_a_success_ends_the_series_and_the_next_failure_begins_another(self, table):
        self.report(table, "r0", error="no memory")
        self.report(table, "r1")
        self.report(table, "r1", version=4)
        assert self.told(table) == (1, "no memory", "no memory", True)
        self.report(table, "r2", error="disk full")
        assert self.told(table) == (1, "disk full", "disk full", False)

    def test_a_replica_that_served_before_ends_no_series_and_fails_no_start(self, table):
        self.report(table, "r1", version=4)
        self.report(table, "r1", version=4, error="the engine's process is dead")
        assert self.told(table) is None
        for number in range(2, 5):
            self.report(table, f"r{number}", error="disk full")
            self.report(table, "r1", version=4)
        assert self.told(table) == (3, "disk full", "disk full", False)
