"""A table that stays as small as it was told to."""

from rollout_service.monitor.statistics import Statistics
from rollout_service.monitor.table import ROWS_PER_VERSION, Key, VersionTable
from tests.unit.monitor.batches import statistics_of

ONE = statistics_of([[(-1.0, -1.5)]])


def add(table: VersionTable, version: int, replica_id: str = "a", statistics: Statistics = ONE) -> bool:
    return table.add(Key(version, replica_id), statistics) is not None


def test_only_the_newest_versions_are_kept_with_all_replicas():
    table = VersionTable(keep_versions=3)
    for version in range(1000):
        for replica_id in ("a", "b") if version % 100 else ("a", f"died-{version}"):
            assert add(table, version, replica_id)
    assert [(row.version, row.replica_id) for row in table.rows()] == [
        (version, replica_id) for version in (997, 998, 999) for replica_id in ("a", "b")
    ]
    assert sum(len(rows) for rows in table._versions.values()) == 6


def test_rows_per_version_are_bounded_and_keep_the_busy_replica():
    table = VersionTable(keep_versions=1)
    for i in range(2 * ROWS_PER_VERSION):
        add(table, 1, f"crashed-{i}")
        add(table, 1, "busy")
    rows = {row.replica_id: row for row in table.rows()}
    assert len(rows) == ROWS_PER_VERSION
    assert rows["busy"].tokens == 2 * ROWS_PER_VERSION
