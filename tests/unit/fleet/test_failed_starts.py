"""The table of starts that failed: the first reason stays until a replica serves, and is told afterwards too."""

from rollout_service.fleet.registry import FleetTable
from rollout_service.protocol.fleet import FailedStarts, ReplicaStatus


def report(table: FleetTable, replica: str, version: int | None = None, error: str | None = None) -> None:
    state = "failed" if error else "starting" if version is None else "ready"
    table.report(ReplicaStatus(replica_id=replica, version=version, state=state, error=error))


def failed(table: FleetTable) -> FailedStarts:
    found = table.starts.failed()
    assert found is not None
    return found


def test_the_first_reason_stays_as_more_replicas_fail_and_leave():
    table = FleetTable(60)
    assert table.starts.failed() is None
    for number in range(3):
        report(table, f"r{number}")
        report(table, f"r{number}", error=f"reason {number}")
        report(table, f"r{number}", error="said again")
        table.leave(f"r{number}")
    assert (failed(table).tries, failed(table).first.reason, failed(table).last.reason) == (3, "reason 0", "reason 2")
    assert (failed(table).first.replica_id, failed(table).over) == ("r0", False)


def test_after_a_success_the_tries_and_the_reason_are_still_told():
    table = FleetTable(60)
    report(table, "r0", error="no memory")
    report(table, "r1")
    report(table, "r1", version=4)
    assert (failed(table).tries, failed(table).first.reason, failed(table).over) == (1, "no memory", True)


def test_the_next_failure_after_a_success_begins_another_series():
    table = FleetTable(60)
    report(table, "r0", error="no memory")
    report(table, "r1", version=4)
    report(table, "r2", error="disk full")
    assert (failed(table).tries, failed(table).first.reason, failed(table).over) == (1, "disk full", False)


def test_a_replica_that_goes_on_serving_ends_no_series():
    """Beside it, each replacement of another one fails."""
    table = FleetTable(60)
    report(table, "r1", version=4)
    for number in range(2, 5):
        report(table, f"r{number}", error="disk full")
        report(table, "r1", version=4)
    assert (failed(table).tries, failed(table).over) == (3, False)


def test_a_replica_that_fails_after_it_served_is_no_failed_start():
    table = FleetTable(60)
    report(table, "r1", version=4)
    report(table, "r1", version=4, error="the engine's process is dead")
    assert table.starts.failed() is None
